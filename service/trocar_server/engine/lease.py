"""Replicas and who may use them: one pass at a time each, fair between callers."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.engine.fair_queue import FairQueue, Priority, Ticket
from trocar_server.engine.pace import Pace
from trocar_server.errors import ServiceError, busy
from trocar_server.models import current_flow

# The wait for a replica ends before the call's deadline, or "busy" would show as a deadline error.
_WAIT_SHARE = 0.9
_LEAST_COST_S = 1e-6
_Turn = asyncio.Future["Replica"]


@dataclass(frozen=True)
class Replica:
    """A module tree over the model's weights, without hooks while nobody leases it."""

    module: nn.Module
    is_live: bool = False
    """Whether its weights change between passes."""


@dataclass(frozen=True)
class Work:
    """What a lease is for.

    Attributes:
        flow: Whose share of time it uses; see `current_flow`.
        rows: Samples of the batch: by them the time that it will take is estimated.
        priority: Which of the flow's own calls go first.
    """

    flow: str
    rows: int = 1
    priority: Priority = Priority.NORMAL


class ReplicaPool:
    """Lends the replicas of one model.

        async with pool.lease(deadline, rows=8) as replica:
            ...

    Where calls wait, every flow gets the same share of the time, and within a flow who came first is first;
    see `FairQueue`. A full line takes a call of a flow with few of them in place of the last one of the flow
    with the most, which is refused then.

    Args:
        replicas: What to lend.
        max_queue: Calls that may wait; one more is refused at once.
    """

    def __init__(self, replicas: Sequence[Replica], max_queue: int) -> None:
        self._free = deque(replicas)
        self._line: FairQueue[_Turn] = FairQueue(Pace().seconds())
        self._ends: dict[int, float] = {}
        """By lease, when it should end, as a time of `time.monotonic()`."""
        self._count = len(replicas)
        self._max_queue = max_queue
        self._is_closed = False
        self._at_rest: asyncio.Event = asyncio.Event()
        self.pace = Pace()

    @property
    def leased_count(self) -> int:
        """Replicas lent out now."""
        return self._count - len(self._free)

    @property
    def count(self) -> int:
        """Replicas that there are."""
        return self._count

    @property
    def waiting_count(self) -> int:
        """Calls that wait for one."""
        return len(self._line)

    @asynccontextmanager
    async def lease(
        self,
        deadline: float | None,
        *,
        rows: int = 1,
        priority: Priority = Priority.NORMAL,
        flow: str | None = None,
    ) -> AsyncIterator[Replica]:
        """Lend a replica until the context ends.

        Args:
            deadline: The call's, as a time of `time.monotonic()` in seconds; None waits as long as
                it takes.
            rows: Samples of the batch; the cost is that of so many by the model's pace so far.
            priority: Which of the flow's own calls go first.
            flow: Whose share of time it uses; that of the present call when None.

        Raises:
            ServiceError: `SERVER_BUSY` when the queue is full, no replica was free in time, or none would be
                by all that is known; `MODEL_NOT_LOADED` when the pool was drained.
        """
        work = Work(current_flow() if flow is None else flow, rows, priority)
        cost = max(self.pace.seconds(rows), _LEAST_COST_S)
        replica = await self._take(work, cost, deadline)
        started = time.monotonic()
        self._ends[id(work)] = started + cost
        is_whole = False
        try:
            yield replica
            is_whole = True
        finally:
            del self._ends[id(work)]
            took_s = time.monotonic() - started
            if is_whole:
                self.pace.observe(rows, took_s)
            self._line.charge(work.flow, took_s - cost)
            self._give_back(replica)

    def check(self, deadline: float | None, rows: int = 1, priority: Priority = Priority.NORMAL) -> None:
        """Refuse a call that a lease would refuse now, before its bytes are taken in; nothing is kept for it.

        Raises:
            ServiceError: `SERVER_BUSY`, as `lease`.
        """
        if not self._free:
            work = Work(current_flow(), rows, priority)
            self._refuse_late(work, _patience(deadline))
            self._place_for(work)

    async def drain(self) -> None:
        """Refuse new calls, serve those that wait, and return when every replica is back."""
        self._is_closed = True
        self._rest()
        await self._at_rest.wait()

    def wait_s(self, work: Work) -> float:
        """Return about how long a call would wait if it came now, in seconds."""
        if self._free:
            return 0.0
        now = time.monotonic()
        running = sum(max(0.0, end - now) for end in self._ends.values())
        cost = self.pace.seconds(work.rows)
        return (running + self._line.cost_before(work.flow, cost, work.priority)) / self._count

    async def _take(self, work: Work, cost: float, deadline: float | None) -> Replica:
        if self._is_closed:
            raise ServiceError(ErrorReason.MODEL_NOT_LOADED, "the model was unloaded; load it first")
        if self._free:
            self._line.charge(work.flow, cost)
            return self._free.popleft()
        patience_s = _patience(deadline)
        self._refuse_late(work, patience_s)
        self._make_room(work)
        try:
            return await self._next(work, cost, patience_s)
        except TimeoutError:
            raise self._busy(work, f"no replica was free within {patience_s:.3g} s") from None

    def _refuse_late(self, work: Work, patience_s: float | None) -> None:
        expected_s = self.wait_s(work)
        if patience_s is not None and self.pace.is_known and expected_s > patience_s:
            raise self._busy(
                work,
                f"about {expected_s:.3g} s of work come before this call, which can wait {patience_s:.3g} s",
            )

    def _place_for(self, work: Work) -> Ticket | None:
        """Return whose place a call would take in a full line: the last of the flow with the most.

        Raises:
            ServiceError: `SERVER_BUSY`, none.
        """
        if len(self._line) < self._max_queue:
            return None
        last = self._line.place_for(work.flow)
        if last is None:
            raise self._busy(work, f"{len(self._line)} calls wait for this model already")
        return last

    def _make_room(self, work: Work) -> None:
        last = self._place_for(work)
        turn = self._line.item(last) if last else None
        if last is None or turn is None:
            return
        self._line.remove(last)
        if not turn.done():
            problem = (
                f"{self._max_queue} calls wait for this model, most of them yours, and others want a share"
            )
            turn.set_exception(self._busy(Work(last.flow, priority=last.priority), problem))

    async def _next(self, work: Work, cost: float, patience_s: float | None) -> Replica:
        """Wait in line for a replica."""
        turn: _Turn = asyncio.get_running_loop().create_future()
        ticket = self._line.push(turn, work.flow, cost, work.priority)
        try:
            async with asyncio.timeout(patience_s):
                return await turn
        except BaseException:
            if not self._line.remove(ticket):
                self._return(turn, work.flow, cost)
            self._rest()
            raise

    def _return(self, turn: _Turn, flow: str, cost: float) -> None:
        """Take back what came in the moment in which the wait ended."""
        if turn.cancelled():
            self._line.charge(flow, -cost)
        elif turn.exception() is None:
            self._line.charge(flow, -cost)
            self._give_back(turn.result())

    def _give_back(self, replica: Replica) -> None:
        while self._line:
            self._line.quantum = self._line.cost / len(self._line)
            turn = self._line.pop()
            if not turn.done():
                turn.set_result(replica)
                return
        self._free.append(replica)
        self._line.forget()
        self._rest()

    def _rest(self) -> None:
        if self._is_closed and not self._line and len(self._free) == self._count:
            self._at_rest.set()

    def _busy(self, work: Work, problem: str) -> ServiceError:
        return busy(f"{problem}; try again later", self.wait_s(work))


def _patience(deadline: float | None) -> float | None:
    """Return how long a call can wait, in seconds."""
    return None if deadline is None else max(0.0, deadline - time.monotonic()) * _WAIT_SHARE
