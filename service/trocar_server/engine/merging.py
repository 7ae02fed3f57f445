"""Running calls of one compiled pass in groups: those that come while a group runs make the next one.

Nobody waits for company: a call that finds nobody before it runs at once, alone.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from trocar_server.engine.fair_queue import FairQueue, Priority
from trocar_server.errors import busy
from trocar_server.models import current_flow, set_flow

Work = TypeVar("Work")
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Turn(Generic[Work, Result]):
    """One call in line.

    Attributes:
        work: What it is about.
        rows: The samples of its batch.
        may_merge: Whether it may run together with others.
        flow: Whose share of time it uses.
        done: Gets its result.
    """

    work: Work
    rows: int
    may_merge: bool
    flow: str
    done: "asyncio.Future[Result]"


Group = Sequence[Work]


class MergingQueue(Generic[Work, Result]):
    """Runs calls one group after another, fair between callers by rows. For one event loop.

    Args:
        run: Runs a group; returns for each a result, or the error that it failed with.
        most_rows: The most rows of the next group of more than one call.
        max_waiting: Calls that may wait; one more is refused at once.
    """

    def __init__(
        self,
        run: Callable[[Group[Work]], Awaitable[Sequence[Result | BaseException]]],
        most_rows: Callable[[], int],
        max_waiting: int,
    ) -> None:
        self._run = run
        self._most_rows = most_rows
        self._max_waiting = max_waiting
        self._waiting: FairQueue[Turn[Work, Result]] = FairQueue(1.0)
        self._running: asyncio.Task[None] | None = None

    async def submit(
        self, work: Work, rows: int, *, may_merge: bool, priority: Priority = Priority.NORMAL
    ) -> Result:
        """Run one call of the present flow, alone or in a group.

        Raises:
            ServiceError: `SERVER_BUSY`, too many wait.
            Exception: What the group's run says of this call.
        """
        flow = current_flow()
        self._make_room(flow)
        turn: Turn[Work, Result] = Turn(
            work, rows, may_merge, flow, asyncio.get_running_loop().create_future()
        )
        ticket = self._waiting.push(turn, flow, max(rows, 1), priority)
        if self._running is None:
            self._running = asyncio.create_task(self._serve())
        try:
            return await turn.done
        finally:
            self._waiting.remove(ticket)  # who does not wait any more needs no pass
            turn.done.cancel()

    def _make_room(self, flow: str) -> None:
        """Let a call into a full line in place of the last one of who has most of them; see `ReplicaPool`."""
        count = len(self._waiting)
        if count < self._max_waiting:
            return
        last = self._waiting.place_for(flow)
        turn = self._waiting.item(last) if last else None
        if last is None or turn is None:
            raise busy(f"{count} calls wait for this model already; try again later")
        self._waiting.remove(last)
        problem = f"{count} calls wait for this model, many of them yours, and others want a share"
        _settle(turn.done, busy(f"{problem}; try again later"))

    async def _serve(self) -> None:
        try:
            while group := self._next_group():
                results: Sequence[Result | BaseException]
                set_flow(group[0].flow)  # that of the first, on the device too
                try:
                    results = await self._run([turn.work for turn in group])
                except Exception as error:  # noqa: BLE001 - handed to every caller
                    results = [error] * len(group)
                for turn, result in zip(group, results, strict=True):
                    _settle(turn.done, result)
        finally:
            self._running = None

    def _next_group(self) -> list[Turn[Work, Result]]:
        """Take the first call in line, and those behind it that may join."""
        group: list[Turn[Work, Result]] = []
        rows, most = 0, self._most_rows()
        if self._waiting:
            self._waiting.quantum = self._waiting.cost / len(self._waiting)
        else:
            self._waiting.forget()
        while (turn := self._waiting.head()) is not None:
            if turn.done.done():  # cancelled in line
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
