"""Merging: calls of one compiled pass run in groups; calls that arrive during a group form the next one.

Calls never wait for a group to fill: a call that finds an empty queue runs at once, alone.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from trocar_server.engine.request.priority import Priority
from trocar_server.engine.schedule.fair_queue import FairQueue
from trocar_server.errors import busy
from trocar_server.models import current_flow, set_flow

Call = TypeVar("Call")
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class QueuedCall(Generic[Call, Result]):
    """One call in the queue.

    Attributes:
        call: What the group's run takes.
        rows: The samples of its batch.
        may_merge: Whether it may be merged with others.
        flow: The flow that is charged.
        done: Future of its result.
    """

    call: Call
    rows: int
    may_merge: bool
    flow: str
    done: "asyncio.Future[Result]"


Group = Sequence[Call]


class MergingQueue(Generic[Call, Result]):
    """Runs calls one group after another, fair between callers by rows. For one event loop.

    Args:
        run: Runs a group; returns for each a result, or the error that it failed with.
        most_rows: The most rows of the next group of more than one call.
        max_waiting: The most waiting calls; one more is refused at once.
    """

    def __init__(
        self,
        run: Callable[[Group[Call]], Awaitable[Sequence[Result | BaseException]]],
        most_rows: Callable[[], int],
        max_waiting: int,
    ) -> None:
        self._run = run
        self._most_rows = most_rows
        self._max_waiting = max_waiting
        self._waiting: FairQueue[QueuedCall[Call, Result]] = FairQueue(1.0)
        self._running: asyncio.Task[None] | None = None

    async def submit(
        self, call: Call, rows: int, *, may_merge: bool, priority: Priority = Priority.NORMAL
    ) -> Result:
        """Run one call of the current flow, alone or in a group.

        Raises:
            ServiceError: `SERVER_BUSY`, too many wait.
            Exception: This call's error from the group's run.
        """
        flow = current_flow()
        self._make_room(flow)
        turn: QueuedCall[Call, Result] = QueuedCall(
            call, rows, may_merge, flow, asyncio.get_running_loop().create_future()
        )
        ticket = self._waiting.push(turn, flow, max(rows, 1), priority)
        if self._running is None:
            self._running = asyncio.create_task(self._serve())
        try:
            return await turn.done
        finally:
            self._waiting.remove(ticket)  # an abandoned call needs no pass
            turn.done.cancel()

    def _make_room(self, flow: str) -> None:
        """Admit a call to a full queue in place of the last of the largest flow; see `ReplicaPool`."""
        count = len(self._waiting)
        if count < self._max_waiting:
            return
        last = self._waiting.place_for(flow)
        turn = self._waiting.item(last) if last else None
        if last is None or turn is None:
            raise busy(f"{count} calls already wait for this model; try again later")
        self._waiting.remove(last)
        problem = f"{count} calls wait for this model, many of them yours; others share the queue"
        _settle(turn.done, busy(f"{problem}; try again later"))

    async def _serve(self) -> None:
        try:
            while group := self._next_group():
                results: Sequence[Result | BaseException]
                set_flow(group[0].flow)  # the first call's flow, on the device too
                try:
                    results = await self._run([turn.call for turn in group])
                except Exception as error:  # noqa: BLE001 - handed to every caller
                    results = [error] * len(group)
                for turn, result in zip(group, results, strict=True):
                    _settle(turn.done, result)
        finally:
            self._running = None

    def _next_group(self) -> list[QueuedCall[Call, Result]]:
        """Take the first call in the queue, and later ones that may be merged with it."""
        group: list[QueuedCall[Call, Result]] = []
        rows, most = 0, self._most_rows()
        if self._waiting:
            self._waiting.quantum = self._waiting.cost / len(self._waiting)
        else:
            self._waiting.forget()
        while (turn := self._waiting.head()) is not None:
            if turn.done.done():  # cancelled while waiting
                self._waiting.pop()
                continue
            is_first = not group
            joins = not is_first and turn.may_merge and group[0].may_merge and rows + turn.rows <= most
            if not (is_first or joins):
                break
            group.append(self._waiting.pop())
            rows += turn.rows
        return group


def _settle(future: "asyncio.Future[Result]", result: Result | BaseException) -> None:
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
