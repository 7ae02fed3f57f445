"""Replicas and who may use them: one pass at a time each, first come, first served."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

# The wait for a replica ends before the call's deadline, or "busy" would show as a deadline error.
_WAIT_SHARE = 0.9


@dataclass(frozen=True)
class Replica:
    """A module tree over the model's weights, without hooks while nobody leases it."""

    module: nn.Module
    is_live: bool = False
    """Whether its weights change between passes."""


class ReplicaPool:
    """Lends the replicas of one model.

        async with pool.lease(deadline) as replica:
            ...

    Args:
        replicas: What to lend.
        max_queue: Calls that may wait; one more is refused at once.
    """

    def __init__(self, replicas: Sequence[Replica], max_queue: int) -> None:
        self._free = deque(replicas)
        self._waiting: deque[asyncio.Future[Replica]] = deque()
        self._count = len(replicas)
        self._max_queue = max_queue
        self._is_closed = False

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
        return len(self._waiting)

    @asynccontextmanager
    async def lease(self, deadline: float | None) -> AsyncIterator[Replica]:
        """Lend a replica until the context ends.

        Args:
            deadline: The call's, as a time of `time.monotonic()` in seconds; None waits as long as
                it takes.

        Raises:
            ServiceError: `SERVER_BUSY` when the queue is full or no replica was free in time,
                `MODEL_NOT_LOADED` when the pool was drained.
        """
        replica = await self._take(deadline)
        try:
            yield replica
        finally:
            self._give_back(replica)

    async def drain(self) -> None:
        """Refuse new calls, serve those that wait, and return when every replica is back."""
        self._is_closed = True
        for _ in range(self._count):
            await self._next(None)

    async def _take(self, deadline: float | None) -> Replica:
        if self._is_closed:
            raise ServiceError(ErrorReason.MODEL_NOT_LOADED, "the model was unloaded; load it first")
        if not self._free and len(self._waiting) >= self._max_queue:
            raise _busy(f"{len(self._waiting)} calls wait for this model already")
        wait_s = None if deadline is None else max(0.0, deadline - time.monotonic()) * _WAIT_SHARE
        try:
            return await self._next(wait_s)
        except TimeoutError:
            raise _busy(f"no replica was free within {wait_s:.3g} s") from None

    async def _next(self, wait_s: float | None) -> Replica:
        """Take a free replica, or wait in line for one."""
        if self._free:
            return self._free.popleft()
        turn: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(wait_s):
                return await turn
        except BaseException:
            if turn in self._waiting:
                self._waiting.remove(turn)
            elif turn.done() and not turn.cancelled():
                self._give_back(turn.result())  # lent in the moment in which the wait ended
            raise

    def _give_back(self, replica: Replica) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(replica)
                return
        self._free.append(replica)


def _busy(problem: str) -> ServiceError:
    return ServiceError(ErrorReason.SERVER_BUSY, f"{problem}; try again later")
