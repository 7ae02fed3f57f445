"""A sweep: one call, disturbed at one of its awaits, and what must hold afterwards.

    outcome = swept(case, Event.CANCEL, at=3, seed=0, folder=tmp_path)

The server is in the state before the call or in the state after it. The call that is sent again is answered,
and then the state is the one after it, whatever the first one did. Nothing of the disturbed call is left.
"""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from tests.orders.world import State, files, leaks, look, served, settled
from tests.support.orders.doorway import Answer
from tests.support.orders.seeded_loop import Watch, run
from trocar_api.v1 import server_pb2

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.orders.case import Case, Request
    from tests.support.orders.doorway import Call
    from tests.support.orders.stepped_server import SteppedServer

ANSWER_S = 120.0
"""Virtual seconds within which every call is answered."""


class Event(StrEnum):
    """What comes at an await of a call."""

    CANCEL = "cancel"
    LATE = "late"  # cancelled when what it awaits is there, and it has not gone on yet
    TWICE = "twice"  # and again while it cleans up
    DISCONNECT = "disconnect"
    KILL = "kill"
    DRAIN = "drain"
    STOP = "stop"


@dataclass(frozen=True)
class Control:
    """A case without an event: its states, the files in them, and its number of awaits."""

    before: State
    after: State
    files: tuple[list[str], list[str]]
    await_count: int


class _Sweep:
    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder

    def served(self, name: str, folder: Path | None = None) -> Any:
        folder = folder or self.folder
        return served(folder, name, is_shared=self.case.is_shared, **self.case.settings)

    async def control(self) -> Control:
        async with self.served("a") as server:
            request = await self.case.prepare(server)
            before, files_before = await look(server), files(self.folder)
            watch = Watch()
            answer = await self.answered(server.door.begin(self.case.method, *request, watch=watch))
            assert answer.is_ok, answer
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
            await asyncio.gather(*acts)
            if event is Event.STOP:
                await self.after_stop(control, answer, request)
            elif event is Event.KILL:
                await self.after_kill(control, request)
            else:
                await self.holds(server, control, answer, tasks)
                await self.again(server, control, request)
                assert files(self.folder) == control.files[1]

    def act(
        self, event: Event, server: SteppedServer, call: Call, watch: Watch, acts: list[Any]
    ) -> Callable[[], object]:
        def twice() -> None:
            call.cancel()
            watch.at, watch.act = watch.count + 1, call.cancel

        def drain() -> None:
            start = server_pb2.DrainRequest(action=server_pb2.DRAIN_ACTION_START)
            acts.append(asyncio.ensure_future(server.door.ask("ServerService/Drain", start)))

        def stop() -> None:
            acts.append(asyncio.ensure_future(server.stop()))

        def kill() -> None:
            shutil.copytree(self.folder, self.copy)

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
        await settled(tasks)
        left = leaks(server, tasks)
        assert not left, left
        undo = server_pb2.DrainRequest(action=server_pb2.DRAIN_ACTION_UNDO)
        assert (await server.door.ask("ServerService/Drain", undo)).is_ok
        state = await look(server)
        self.check_state(control, state, answer)
        if self.case.survives:
            await self.is_on_disk(state)

    async def is_on_disk(self, state: State) -> None:
        """Start a server on a copy of the files: it must be in the same state."""
        shutil.copytree(self.folder, self.copy)
        async with self.served("b", self.copy) as server:
            stored = await look(server)
            assert stored == state, ["on disk", differences(stored, state)]

    def check_state(self, control: Control, state: State, answer: Answer) -> None:
        """Compare with the states before and after; after a call that was answered, only with the latter."""
        allowed = [control.after] if answer.is_ok else [control.before, control.after]
        assert state in allowed, [answer, *(differences(state, one) for one in allowed)]

    async def again(self, server: SteppedServer, control: Control, request: Request) -> None:
        """Send the call again, and check that it is applied once."""
        tasks = asyncio.all_tasks()
        answer = await self.answered(server.door.begin(self.case.method, *request, is_repeated=True))
        assert answer.code in self.case.again, answer
        await settled(tasks)
        left = leaks(server, tasks)
        assert not left, left
        state = await look(server)
        assert state == control.after, differences(state, control.after)

    async def after_kill(self, control: Control, request: Request) -> None:
        """Start a server on the files as they were at the moment of the kill."""
        if not self.copy.exists():  # the call has fewer awaits in this order
            return
        async with self.served("b", self.copy) as server:
            self.check_state(control, await look(server), _NONE)
            await self.again(server, control, request)

    async def after_stop(self, control: Control, answer: Answer, request: Request) -> None:
        """Start a server on the files that the other one has left."""
        async with self.served("b") as server:
            self.check_state(control, await look(server), answer)
            await self.again(server, control, request)


_NONE = Answer("")


def differences(state: State, expected: State) -> dict[str, Any]:
    """Return the parts of a state that are not as expected, with both values."""
    return {name: (value, expected[name]) for name, value in state.items() if value != expected[name]}


def controlled(case: Case, seed: int, folder: Path) -> Control:
    """Make the call without an event, and compare it with its model."""
    folder.mkdir()
    return run(seed, _Sweep(case, folder).control())


def swept(case: Case, control: Control, event: Event, at: int, seed: int, folder: Path) -> None:
    """Make the call with an event at one of its awaits.

    Raises:
        AssertionError: Something that must hold does not.
    """
    folder.mkdir()
    run(seed, _Sweep(case, folder).disturb(control, event, at))
