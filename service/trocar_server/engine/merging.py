"""Running calls of one compiled pass in groups: those that come while a group runs make the next one.

Nobody waits for company: a call that finds nobody before it runs at once, alone.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

Work = TypeVar("Work")
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Turn(Generic[Work, Result]):
    """One call in line.

    Attributes:
        work: What it is about.
        rows: The samples of its batch.
        may_merge: Whether it may run together with others.
        done: Gets its result.
    """

    work: Work
    rows: int
    may_merge: bool
    done: "asyncio.Future[Result]"


Group = Sequence[Work]


class MergingQueue(Generic[Work, Result]):
    """Runs calls one group after another. Every method belongs to one event loop.

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
        self._waiting: deque[Turn[Work, Result]] = deque()
        self._running: asyncio.Task[None] | None = None

    async def submit(self, work: Work, rows: int, *, may_merge: bool) -> Result:
        """Run one call, alone or in a group.

        Raises:
            ServiceError: `SERVER_BUSY`, too many wait.
            Exception: What the group's run says of this call.
        """
        if len(self._waiting) >= self._max_waiting:
            raise ServiceError(
                ErrorReason.SERVER_BUSY,
                f"{len(self._waiting)} calls wait for this model already; try again later",
            )
        turn: Turn[Work, Result] = Turn(work, rows, may_merge, asyncio.get_running_loop().create_future())
        self._waiting.append(turn)
        if self._running is None:
            self._running = asyncio.create_task(self._serve())
        try:
            return await turn.done
        finally:
            turn.done.cancel()  # who does not wait any more needs no pass

    async def _serve(self) -> None:
        try:
            while group := self._next_group():
                results: Sequence[Result | BaseException]
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
        while self._waiting:
            turn = self._waiting[0]
            if turn.done.done():  # cancelled in line
                self._waiting.popleft()
                continue
            is_first = not group
            joins = not is_first and turn.may_merge and group[0].may_merge and rows + turn.rows <= most
            if not (is_first or joins):
                break
            group.append(self._waiting.popleft())
            rows += turn.rows
        return group


def _settle(future: "asyncio.Future[Result]", result: Result | BaseException) -> None:
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
