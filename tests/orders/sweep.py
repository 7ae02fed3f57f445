"""A sweep: one call, disturbed at one of its awaits, and what must hold afterwards.

    outcome = swept(case, Event.CANCEL, at=3, seed=0, folder=tmp_path)

The server is in the state before the call or in the state after it. The call that is sent again is answered,
and then the state is the one after it, whatever the first one did. Nothing of the disturbed call is left.
"""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tests.orders.case import Event
from tests.orders.world import State, copied, files, fits_rest, leaks, look, served, settled
from tests.support.orders.amount import SEED, pairs
from tests.support.orders.doorway import Answer
from tests.support.orders.seeded_loop import Watch, run
from trocar_api.v1 import server_pb2

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.orders.case import Case, Request
    from tests.support.orders.doorway import Call
    from tests.support.orders.stepped_server import SteppedServer

_NONE = Answer("")
ANSWER_S = 120.0
"""Virtual seconds within which every call is answered."""
GAPS = (1, 2, 3)
"""Awaits from a cancellation to a second one; which of them meets what cleans up differs with the order."""


@dataclass(frozen=True)
class Control:
    """A case without an event: its states, the files in them, and its number of awaits."""

    before: State
    after: State
    files: tuple[set[str], set[str]]
    await_count: int
    restarted: dict[Event, tuple[State, State]] = field(default_factory=dict)
    """The states before and after of a server that was killed or stopped there, and started again."""


class _Sweep:
    def __init__(self, case: Case, folder: Path, gap: int = 1) -> None:
        self.case, self.folder, self.gap = case, folder, gap
        self.told = _NONE
        """What the caller had been told when the server was killed."""

    def served(self, name: str, folder: Path | None = None) -> Any:
        folder = folder or self.folder
        return served(folder, name, is_shared=self.case.is_shared, **self.case.settings)

    async def control(self) -> Control:
        async with self.served("a") as server:
            request = await self.case.prepare(server)
            before, files_before = await look(server), files(self.folder)
            watch = Watch()
            tasks = asyncio.all_tasks()
            answer = await self.answered(server.door.begin(self.case.method, *request, watch=watch))
            assert answer.is_ok, answer
            await settled(tasks)
            after = await look(server)
            expected = self.case.change(before)
            assert after == expected, differences(after, expected)
            return Control(before, after, (files_before, files(self.folder)), watch.count)

    async def disturb(self, control: Control, event: Event, at: int) -> None:
        async with self.served("a") as server:
            request = await self.case.prepare(server)
            assert await look(server) == control.before
            tasks = asyncio.all_tasks()
            acts: list[Any] = []
            watch = Watch(at, is_late=event is Event.LATE)
            call = server.door.begin(self.case.method, *request, watch=watch)
            watch.act = self.act(event, server, call, watch, acts)
            answer = await self.answered(call)
            await settled(tasks)  # the event may come in what the call has begun
            await asyncio.gather(*acts)
            if event is Event.STOP:
                await server.stop()
                await self.after_restart(control, event, answer, request)
            elif event is Event.KILL:
                await self.after_kill(control, request)
            else:
                await self.holds(server, control, answer, tasks)
                await self.again(server, control, request)
                left = files(self.folder) - control.files[1]
                assert not left, ["files", left]

    def act(
        self, event: Event, server: SteppedServer, call: Call, watch: Watch, acts: list[Any]
    ) -> Callable[[], object]:
        def twice() -> None:
            call.cancel()
            watch.at, watch.act = watch.count + self.gap, call.cancel

        def drain() -> None:
            start = server_pb2.DrainRequest(action=server_pb2.DRAIN_ACTION_START)
            acts.append(asyncio.ensure_future(server.door.ask("ServerService/Drain", start)))

        def stop() -> None:
            acts.append(asyncio.ensure_future(server.stop()))

        def kill() -> None:
            copied(self.folder, self.copy)
            self.told = call.answer if call.task.done() else _NONE

        return {
            Event.CANCEL: call.cancel,
            Event.LATE: call.cancel,
            Event.TWICE: twice,
            Event.DISCONNECT: call.disconnect,
            Event.KILL: kill,
            Event.DRAIN: drain,
            Event.STOP: stop,
        }[event]

    @property
    def copy(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}-killed")

    async def answered(self, call: Call) -> Answer:
        return await asyncio.wait_for(call.ended(), ANSWER_S)

    async def holds(
        self, server: SteppedServer, control: Control, answer: Answer, tasks: set[asyncio.Task[Any]]
    ) -> None:
        """Check the server after the event."""
        if server.app.lifecycle.is_draining and not control.after["is_draining"]:
            undo = server_pb2.DrainRequest(action=server_pb2.DRAIN_ACTION_UNDO)
            assert (await server.door.ask("ServerService/Drain", undo)).is_ok
        await settled(tasks)
        left = leaks(server, tasks)
        assert not left, left
        state = await look(server)
        self.check_state(control, state, answer)
        if Event.KILL in self.case.repeats_after:
            await self.is_on_disk(state)

    async def is_on_disk(self, state: State) -> None:
        """Start a server on a copy of the files: it must be in the same state."""
        copied(self.folder, self.copy)
        async with self.served("b", self.copy) as server:
            stored = await look(server)
            assert stored == state, ["on disk", differences(stored, state)]

    async def restarted(self, event: Event, *, is_after: bool) -> State:
        """Return the state of a server that is started after another was killed or stopped without a call."""
        async with self.served("a") as server:
            request = await self.case.prepare(server)
            if is_after:
                assert (await server.door.ask(self.case.method, *request)).is_ok
                await fits_rest(server)
            if event is Event.STOP:
                await server.stop()
            copied(self.folder, self.copy)
        async with self.served("b", self.copy) as server:
            return await look(server)

    def check_state(self, control: Control, state: State, answer: Answer) -> None:
        """Compare with the states before and after; after a call that was answered, only with the latter."""
        allowed = [control.after] if answer.is_ok else [control.before, control.after]
        assert state in allowed, [answer, *(differences(state, one) for one in allowed)]

    async def again(
        self, server: SteppedServer, control: Control, request: Request, further: tuple[str, ...] = ()
    ) -> None:
        """Send the call again, and check that it is applied once."""
        tasks = asyncio.all_tasks()
        answer = await self.answered(server.door.begin(self.case.method, *request, is_repeated=True))
        assert answer.code in (*self.case.again, *further), answer
        await settled(tasks)
        left = leaks(server, tasks)
        assert not left, left
        state = await look(server)
        assert state == control.after, differences(state, control.after)

    async def after_kill(self, control: Control, request: Request) -> None:
        """Start a server on the files as they were at the moment of the kill."""
        if self.copy.exists():  # the call may have fewer awaits in this order
            await self.after_restart(control, Event.KILL, self.told, request)

    async def after_restart(self, control: Control, event: Event, answer: Answer, request: Request) -> None:
        """Start a server on the files that another has left."""
        folder = self.copy if event is Event.KILL else self.folder
        async with self.served("b", folder) as server:
            before, after = control.restarted[event]
            state = await look(server)
            if self.case.between is None or answer.is_ok or state != self.case.between(before, after):
                self.check_state(replace(control, before=before, after=after), state, answer)
            if event in self.case.repeats_after:
                await self.again(server, control, request, self.case.again_later)


def differences(state: State, expected: State) -> dict[str, Any]:
    """Return the parts of a state that are not as expected, with both values."""
    return {name: (value, expected[name]) for name, value in state.items() if value != expected[name]}


def controlled(case: Case, seed: int, folder: Path) -> Control:
    """Make the call without an event, and compare it with its model."""
    folder.mkdir()
    return run(seed, _Sweep(case, folder).control())


def swept(case: Case, control: Control, event: Event, at: int, seed: int, folder: Path, gap: int = 1) -> None:
    """Make the call with an event at one of its awaits; a second cancellation comes `gap` awaits later.

    Raises:
        AssertionError: Something that must hold does not.
    """
    if event in (Event.KILL, Event.STOP) and event not in control.restarted:
        control.restarted[event] = _restarted(case, event, seed, folder)
    folder.mkdir()
    run(seed, _Sweep(case, folder, gap).disturb(control, event, at))


def _restarted(case: Case, event: Event, seed: int, folder: Path) -> tuple[State, State]:
    states = []
    for is_after in (False, True):
        own = folder.with_name(f"{folder.name}-{event}-{is_after}")
        own.mkdir()
        states.append(run(seed, _Sweep(case, own).restarted(event, is_after=is_after)))
    return states[0], states[1]


def sweep(case: Case, folder: Path) -> None:
    """Make the call with the events, at the awaits, that are drawn for it.

    Raises:
        AssertionError: Something that must hold does not; the note says with which event, where.
    """
    control = controlled(case, SEED, folder / "control")
    for event, at in pairs(list(Event), control.await_count, str(case)):
        own = folder / f"{event}-{at}"
        try:
            swept(case, control, event, at, SEED, own, GAPS[at % len(GAPS)])
        except Exception as error:
            error.add_note(f"{case}: {event} at await {at} of {control.await_count}, seed {SEED}")
            raise
        for left in folder.glob(f"{own.name}*"):
            shutil.rmtree(left)
