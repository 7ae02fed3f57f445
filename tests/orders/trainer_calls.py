"""Calls of trainers, and the model of a trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.orders.case import Case, Other, Request, asked
from tests.support.oracles.tiny_training import MODELS, samples
from trocar._wire.trainer_requests import wire_batch
from trocar_api.v1 import trainer_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.orders.world import State
    from tests.support.orders.stepped_server import SteppedServer

SETTINGS = {"models": MODELS}
STEP = pb.TRAIN_KIND_STEP


async def create(server: SteppedServer, **options: object) -> str:
    spec = pb.TrainerSpec(model_id="tiny", seed=7, **options)  # type: ignore[arg-type]
    answer = await asked(server, "TrainerService/CreateTrainer", pb.CreateTrainerRequest(spec=spec))
    return pb.CreateTrainerResponse.FromString(answer.replies[0]).trainer.trainer_id


def batch(trainer_id: str, number: int, kind: pb.TrainKind.ValueType = STEP) -> Request:
    call = wire_batch(*samples(4, number)).call(trainer_id, kind, number)
    return list(call.messages())


async def stepped(server: SteppedServer, count: int = 1) -> str:
    trainer_id = await create(server)
    for number in range(count):
        await asked(server, "TrainerService/Train", *batch(trainer_id, number))
    return trainer_id


# --- Model: (next number, updates, accumulated, weights, checkpoints with a note, state) -------------


def advanced(updates: int, accumulated: int = 0) -> Callable[[State], State]:
    def change(state: State) -> State:
        (number, before, _, weights, *rest), *others = state["trainers"]
        changed = (number + 1, before + updates, accumulated, Other(weights), *rest)
        return state | {"trainers": [changed, *others]}

    return change


# --- Cases --------------------------------------------------------------------------------------------


async def step(server: SteppedServer) -> Request:
    return batch(await stepped(server), 1)


CASES = [
    Case("TrainerService/Train", step, advanced(1), "journal", SETTINGS, is_shared=True),
]
