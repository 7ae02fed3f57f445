"""Calls of trainers, and the model of a trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.orders.case import (
    IN_MEMORY,
    STORED_AT_STOP,
    Case,
    Event,
    Other,
    Request,
    asked,
    same,
)
from tests.support.oracles.tiny_training import MODELS, samples
from trocar._wire.trainer_requests import wire_batch
from trocar_api.v1 import model_pb2
from trocar_api.v1 import trainer_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.orders.world import State
    from tests.support.orders.stepped_server import SteppedServer

SETTINGS = {"models": MODELS}
LOADED = model_pb2.MODEL_STATE_LOADED
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


# --- Model of a trainer: next number, updates, accumulated batches, weights, checkpoints, state ------


def advanced(updates: int, accumulated: int = 0) -> Callable[[State], State]:
    def change(state: State) -> State:
        (number, before, _, weights, *rest), *others = state["trainers"]
        now = Other(weights)  # a half step moves buffers
        return state | {"trainers": [(number + 1, before + updates, accumulated, now, *rest), *others]}

    return change


def created(state: State) -> State:
    (_, _, _, weights, _, _), *_ = state["trainers"]
    return state | {"trainers": [(0, 0, 0, weights, (), "ready"), *state["trainers"]]}


def closed(state: State) -> State:
    return state | {"trainers": state["trainers"][1:]}


def saved(note: str, number: int = 1) -> Callable[[State], State]:
    def change(state: State) -> State:
        (*others, checkpoints, activity), *more = state["trainers"]
        return state | {"trainers": [(*others, (*checkpoints, (number, others[1], note)), activity), *more]}

    return change


def restored(state: State) -> State:
    (_, _, _, weights, ((_, updates, _), *_), _), *_ = state["trainers"]
    rest = state["trainers"][0][4:]
    return state | {"trainers": [(updates, updates, 0, Other(weights), *rest)]}


def published(state: State) -> State:
    return state | {"models": state["models"] | {"mine": LOADED}}


def unpublished(state: State) -> State:
    return state | {"models": {name: how for name, how in state["models"].items() if name != "mine"}}


# --- Cases --------------------------------------------------------------------------------------------

NOTE = "by hand"


async def step(server: SteppedServer) -> Request:
    return batch(await stepped(server), 1)


async def half(server: SteppedServer) -> Request:
    return batch(await stepped(server), 1, pb.TRAIN_KIND_FORWARD_BACKWARD)


async def update(server: SteppedServer) -> Request:
    trainer_id = await stepped(server)
    await asked(server, "TrainerService/Train", *batch(trainer_id, 1, pb.TRAIN_KIND_FORWARD_BACKWARD))
    return [pb.StepOptimizerRequest(trainer_id=trainer_id, number=2)]


async def evaluation(server: SteppedServer) -> Request:
    trainer_id = await stepped(server)
    call = wire_batch(*samples(4, 5)).call(trainer_id, pb.TRAIN_KIND_EVALUATE)
    return list(call.messages())


async def creation(server: SteppedServer) -> Request:
    await create(server)
    return [pb.CreateTrainerRequest(spec=pb.TrainerSpec(model_id="tiny", seed=7), request_id="c" * 32)]


async def closing(server: SteppedServer) -> Request:
    return [pb.CloseTrainerRequest(trainer_id=await stepped(server))]


async def saving(server: SteppedServer) -> Request:
    return [pb.SaveTrainerRequest(trainer_id=await stepped(server), note=NOTE, request_id="s" * 32)]


async def restoring(server: SteppedServer) -> Request:
    trainer_id = await stepped(server)
    answer = await asked(
        server, "TrainerService/SaveTrainer", pb.SaveTrainerRequest(trainer_id=trainer_id, note=NOTE)
    )
    number = pb.SaveTrainerResponse.FromString(answer.replies[0]).checkpoint.number
    await asked(server, "TrainerService/Train", *batch(trainer_id, 1))
    return [pb.RestoreTrainerRequest(trainer_id=trainer_id, checkpoint_number=number)]


async def exporting(server: SteppedServer) -> Request:
    return [pb.ExportTrainerRequest(trainer_id=await stepped(server))]


async def adapting(server: SteppedServer) -> Request:
    adapter = pb.LoraSpec(ranks=[pb.LoraRankSpec(selector="fc", rank=2)])
    trained = await create(server, lora=adapter)
    await asked(server, "TrainerService/Train", *batch(trained, 0))
    wanted = pb.ExportTrainerRequest(trainer_id=trained, content=pb.EXPORT_CONTENT_ADAPTER)
    answer = await asked(server, "TrainerService/ExportTrainer", wanted)
    data = b"".join(pb.ExportTrainerResponse.FromString(one).data for one in answer.replies)
    await asked(server, "TrainerService/CloseTrainer", pb.CloseTrainerRequest(trainer_id=trained))
    trainer_id = await create(server, lora=adapter)
    first = pb.LoadAdapterRequest(trainer_id=trainer_id, request_id="l" * 32, data=data[:100])
    return [first, pb.LoadAdapterRequest(data=data[100:])]


def adapted(state: State) -> State:
    (number, updates, accumulated, weights, checkpoints, activity), *_ = state["trainers"]
    saved_now = (*checkpoints, (1, updates, "a loaded adapter"))
    return state | {"trainers": [(number, updates, accumulated, Other(weights), saved_now, activity)]}


async def publishing(server: SteppedServer) -> Request:
    trainer_id = await stepped(server)
    await asked(server, "TrainerService/SaveTrainer", pb.SaveTrainerRequest(trainer_id=trainer_id, note=NOTE))
    return [pb.PublishTrainerRequest(trainer_id=trainer_id, model_id="mine")]


async def unpublishing(server: SteppedServer) -> Request:
    await asked(server, "TrainerService/PublishTrainer", *await publishing(server))
    return [pb.UnpublishModelRequest(model_id="mine")]


GONE = ("OK", "NOT_FOUND")


def cases(*, is_shared: bool) -> Iterator[Case]:
    steps = frozenset(Event) if is_shared else STORED_AT_STOP
    for name, prepare, change, repeats_after, again in (
        ("Train", step, advanced(1), steps, ("OK",)),
        ("Train:half", half, advanced(0, 1), steps if is_shared else IN_MEMORY, ("OK",)),
        ("Train:evaluate", evaluation, same, steps, ("OK",)),
        ("StepOptimizer", update, advanced(1), steps, ("OK",)),
        ("CreateTrainer", creation, created, frozenset(Event), ("OK",)),
        ("CloseTrainer", closing, closed, steps, GONE),
        ("SaveTrainer", saving, saved(NOTE), steps, ("OK",)),
        ("RestoreTrainer", restoring, restored, steps, ("OK",)),
        ("ExportTrainer", exporting, same, steps, ("OK",)),
        ("LoadAdapter", adapting, adapted, frozenset(Event), ("OK",)),
        ("PublishTrainer", publishing, published, frozenset(Event), ("OK",)),
        ("UnpublishModel", unpublishing, unpublished, frozenset(Event), ("OK",)),
    ):
        method, _, kind = name.partition(":")
        kind = "-".join(filter(None, (kind, "journal" * is_shared)))
        path = f"TrainerService/{method}"
        later = () if is_shared or again == GONE else ("ABORTED",)  # results of steps are not stored
        yield Case(path, prepare, change, kind, SETTINGS, is_shared, again, later, repeats_after)


CASES = [*cases(is_shared=True), *cases(is_shared=False)]
