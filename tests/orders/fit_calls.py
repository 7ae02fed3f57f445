"""Calls of fits, and the model of a fit: its events, from `started` to the last one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.orders.case import IN_MEMORY, Case, Event, Other, Request, asked, same
from tests.orders.stored_calls import shard, stored
from tests.orders.trainer_calls import SETTINGS, create
from trocar_api.v1 import fit_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.orders.world import State
    from tests.support.orders.stepped_server import SteppedServer

EPOCHS, STEPS = 2, 3
LAST = "finished"
START = "FitService/StartFit"
CONTROL = "FitService/ControlFit"


async def starting(server: SteppedServer) -> Request:
    dataset_id = await stored(server, "digits", shard(0), shard(1))
    spec = pb.FitSpec(dataset_id=dataset_id, epochs=EPOCHS, batch_size=2, checkpoint_every=2)
    return [pb.StartFitRequest(trainer_id=await create(server), spec=spec, request_id="f" * 32)]


async def held(server: SteppedServer) -> str:
    """Begin a fit that is held before its first batch."""
    (request,) = await starting(server)
    await server.app.fits.hold_all()
    await asked(server, START, request)
    return request.trainer_id  # type: ignore[union-attr, no-any-return]


def controlling(command: pb.FitCommand.ValueType, *, is_paused: bool) -> Callable[[SteppedServer], Any]:
    async def prepare(server: SteppedServer) -> Request:
        trainer_id = await held(server)
        if is_paused:
            await asked(server, CONTROL, *request(trainer_id, pb.FIT_COMMAND_PAUSE))
            server.app.fits.let_go_on()
        return request(trainer_id, command)

    return prepare


def request(trainer_id: str, command: pb.FitCommand.ValueType) -> Request:
    return [pb.ControlFitRequest(trainer_id=trainer_id, command=command)]


async def watching(server: SteppedServer) -> Request:
    (request,) = await starting(server)
    await asked(server, START, request)
    return [pb.WatchFitRequest(trainer_id=request.trainer_id, event_number=0)]  # type: ignore[union-attr]


# --- Model --------------------------------------------------------------------------------------------


class Kinds:
    """Stands in a model for events with these of kinds that come once, and with this number of steps."""

    def __init__(self, *once: str, steps: int) -> None:
        self._once, self._steps = once, steps

    def __eq__(self, events: object) -> bool:
        assert isinstance(events, list)
        kinds = [event[0] for event in events]
        steps = [event[1] for event in events if event[0] == "step"]
        once = [kind for kind in kinds if kind not in ("step", "epoch")]
        return once == sorted(self._once) and sorted(steps) == [str(n + 1) for n in range(self._steps)]

    def __hash__(self) -> int:
        return 0


def ended(*others: str) -> Callable[[State], State]:
    def change(state: State) -> State:
        ((number, updates, _, weights, checkpoints, _),) = state["trainers"]
        now = (number, updates + EPOCHS * STEPS, 0, Other(weights), checkpoints, "ready")
        events = Kinds("started", *others, LAST, steps=EPOCHS * STEPS)
        return state | {"trainers": [now], "fits": [events]}

    return change


def paused(state: State) -> State:
    (trainer,) = state["trainers"]
    return state | {"trainers": [(*trainer[:-1], "paused")], "fits": [Kinds("started", "paused", steps=0)]}


def untold(kind: str) -> Callable[[State, State], State]:
    """Model a pause, or its end, that is on disk, and its event is not."""

    def between(_: State, after: State) -> State:
        (events,) = after["fits"]
        return after | {"fits": [[event for event in events if event[0] != kind]]}

    return between


def cancelled(state: State) -> State:
    (trainer,) = state["trainers"]
    return state | {
        "trainers": [(*trainer[:-1], "ready")],
        "fits": [Kinds("started", "paused", "cancelled", steps=0)],
    }


def cases(*, is_shared: bool) -> Iterator[Case]:
    pause, resume, cancel = pb.FIT_COMMAND_PAUSE, pb.FIT_COMMAND_RESUME, pb.FIT_COMMAND_CANCEL
    for method, name, prepare, change, repeats_after in (
        (START, "", starting, ended(), frozenset(Event)),
        (CONTROL, "pause", controlling(pause, is_paused=False), paused, IN_MEMORY),
        (CONTROL, "resume", controlling(resume, is_paused=True), ended("paused", "resumed"), IN_MEMORY),
        (CONTROL, "cancel", controlling(cancel, is_paused=True), cancelled, frozenset(Event)),
        ("FitService/WatchFit", "", watching, same, frozenset(Event)),
    ):
        kind = "-".join(filter(None, (name, "shared" * is_shared)))
        between = untold(f"{name}d") if name in ("pause", "resume") else None
        again = ("OK", "NOT_FOUND") if name == "resume" else ("OK",)  # the fit may have ended since
        yield Case(
            method, prepare, change, kind, SETTINGS, is_shared, again, (), repeats_after, between=between
        )


CASES = [*cases(is_shared=False), *cases(is_shared=True)]
