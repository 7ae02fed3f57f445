"""Merging: calls of one compiled pass run in groups; calls that arrive during a group form the next one.

Calls never wait for a group to fill: a call that finds an empty queue runs at once, alone. Which calls may
share a group is decided by `merge_group`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from trocar_server.engine.request.priority import Priority
from trocar_server.engine.schedule.admission import PassThroughput
from trocar_server.engine.schedule.fair_queue import FairQueue, Ticket
from trocar_server.engine.schedule.lease import patience
from trocar_server.engine.schedule.merge_group import MergeGroup
from trocar_server.errors import ServiceError, busy
from trocar_server.models import current_flow, set_flow

Call = TypeVar("Call")
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class QueuedCall(Generic[Call, Result]):
    """One call in the queue.

    Attributes:
        call: What the group's run takes.
        rows: The samples of its batch.
        group: The calls that it may be merged with; None for a call that runs alone.
        flow: The flow that is charged.
        done: Future of its result.
    """

    call: Call
    rows: int
    group: MergeGroup | None
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
        self._throughput = PassThroughput()
        self._ends_at = 0.0
        """Expected end of the running group, as a time of `time.monotonic()`."""

    @property
    def is_running(self) -> bool:
        """Whether a group runs."""
        return self._running is not None

    @property
    def waiting_count(self) -> int:
        """Number of calls that wait for their group."""
        return len(self._waiting)

    @property
    def pending_s(self) -> float:
        """Estimated seconds of computing that running and waiting calls still need."""
        return self._running_s() + self._waiting.cost * self._throughput.seconds()

    def waiting_counts(self) -> dict[str, int]:
        """Return the number of waiting calls by flow."""
        return {flow: count for flow, count in self._waiting.flows() if count}

    async def submit(
        self,
        call: Call,
        rows: int,
        *,
        group: MergeGroup | None,
        priority: Priority = Priority.NORMAL,
        deadline: float | None = None,
    ) -> Result:
        """Run one call of the current flow, alone or in a group.

        Args:
            call: The call.
            rows: The samples of its batch.
            group: The calls that it may be merged with; None to run it alone.
            priority: Order among the flow's own calls.
            deadline: The call's, as a time of `time.monotonic()` in seconds; None waits without limit.

        Raises:
            ServiceError: `SERVER_BUSY`, too many wait, or its group did not begin in time or is not
                expected to.
            Exception: This call's error from the group's run.
        """
        flow, patience_s = current_flow(), patience(deadline)
        self._refuse_late(flow, rows, priority, patience_s)
        self._make_room(flow)
        loop = asyncio.get_running_loop()
        turn: QueuedCall[Call, Result] = QueuedCall(call, rows, group, flow, loop.create_future())
        ticket = self._waiting.push(turn, flow, max(rows, 1), priority)
        timer = None
        if self._running is None:
            self._running = asyncio.create_task(self._serve())
        elif patience_s is not None:
            timer = loop.call_later(patience_s, self._give_up, ticket, turn, patience_s)
        try:
            return await turn.done
        finally:
            if timer is not None:
                timer.cancel()
            self._waiting.remove(ticket)  # an abandoned call needs no pass
            turn.done.cancel()

    async def drained(self) -> None:
        """Wait until no call runs or waits; later ones are not refused."""
        while self._running is not None:
            await asyncio.wait([self._running])

    def _give_up(self, ticket: Ticket, turn: QueuedCall[Call, Result], patience_s: float) -> None:
        """Refuse a call that still waits, before its deadline would."""
        if self._waiting.remove(ticket):
            problem = f"the compiled pass was not free within {patience_s:.3g} s"
            _settle(turn.done, self._busy(problem, turn.flow, turn.rows, ticket.priority))

    def _refuse_late(self, flow: str, rows: int, priority: Priority, patience_s: float | None) -> None:
        if patience_s is None or self._running is None or not self._throughput.is_known:
            return
        expected_s = self._wait_s(flow, rows, priority)
        if expected_s > patience_s:
            problem = (
                f"about {expected_s:.3g} s of work wait before this call, which can wait only "
                f"{patience_s:.3g} s"
            )
            raise self._busy(problem, flow, rows, priority)

    def _wait_s(self, flow: str, rows: int, priority: Priority) -> float:
        """Return about how long a call would wait if it arrived now, in seconds."""
        before = self._waiting.cost_before(flow, max(rows, 1), priority)
        return self._running_s() + before * self._throughput.seconds()

    def _running_s(self) -> float:
        return max(0.0, self._ends_at - time.monotonic()) if self._running is not None else 0.0

    def _busy(self, problem: str, flow: str, rows: int, priority: Priority) -> ServiceError:
        return busy(f"{problem}; try again later", self._wait_s(flow, rows, priority))

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
                results = await self._results(group)
                for turn, result in zip(group, results, strict=True):
                    _settle(turn.done, result)
        finally:
            self._running = None

    async def _results(self, group: Sequence[QueuedCall[Call, Result]]) -> Sequence[Result | BaseException]:
        """Run a group, and learn its time where any of its calls ran."""
        set_flow(group[0].flow)  # the first call's flow, on the device too
        rows, started = sum(turn.rows for turn in group), time.monotonic()
        self._ends_at = started + self._throughput.seconds(rows)
        try:
            results = await self._run([turn.call for turn in group])
        except Exception as error:  # noqa: BLE001 - handed to every caller
            return [error] * len(group)
        if not all(isinstance(result, BaseException) for result in results):
            self._throughput.observe(rows, time.monotonic() - started)
        return results

    def _next_group(self) -> list[QueuedCall[Call, Result]]:
        """Take the first call in the queue, and later ones that may be merged with it."""
        group: list[QueuedCall[Call, Result]] = []
        rows, most = 0, self._most_rows()
        if self._waiting:
            self._waiting.quantum = self._waiting.cost / len(self._waiting)
        else:
            self._waiting.forget()
        flow = None
        while (turn := self._waiting.head(flow)) is not None:
            if turn.done.done():  # cancelled while waiting
                self._waiting.pop(flow)
                continue
            if group and (turn.group != group[0].group or rows + turn.rows > most):
                break
            group.append(self._waiting.pop(flow))
            rows += turn.rows
            if turn.group is None:
                break
            if turn.group.principal is not None:
                # Its calls join out of turn, at their cost, or callers who alternate would never merge.
                flow = turn.flow
        return group


def _settle(future: "asyncio.Future[Result]", result: Result | BaseException) -> None:
    if future.done():
        return
    if isinstance(result, BaseException):
        future.set_exception(result)
    else:
        future.set_result(result)
