"""Replicas and who may use them: one pass at a time each, first come, first served."""

import asyncio
import time
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


class ReplicaPool:
    """Lends the replicas of one model.

        async with pool.lease(deadline) as replica:
            ...

    Args:
        replicas: What to lend.
        max_queue: Calls that may wait; one more is refused at once.
    """

    def __init__(self, replicas: Sequence[Replica], max_queue: int) -> None:
        self._free: asyncio.Queue[Replica] = asyncio.Queue()
        for replica in replicas:
            self._free.put_nowait(replica)
        self._count = len(replicas)
        self._max_queue = max_queue
        self._waiting = 0

    @property
    def leased_count(self) -> int:
        """Replicas lent out now."""
        return self._count - self._free.qsize()

    @asynccontextmanager
    async def lease(self, deadline: float | None) -> AsyncIterator[Replica]:
        """Lend a replica until the context ends.

        Args:
            deadline: The call's, as a time of `time.monotonic()` in seconds; None waits as long as
                it takes.

        Raises:
            ServiceError: `SERVER_BUSY` when the queue is full or no replica was free in time.
        """
        replica = await self._take(deadline)
        try:
            yield replica
        finally:
            self._free.put_nowait(replica)

    async def drain(self) -> None:
        """Wait until every replica is back, and keep them."""
        for _ in range(self._count):
            await self._free.get()

    async def _take(self, deadline: float | None) -> Replica:
        if not self._waiting and not self._free.empty():
            return self._free.get_nowait()
        if self._waiting >= self._max_queue:
            raise _busy(f"{self._waiting} calls wait for this model already")
        wait_s = None if deadline is None else max(0.0, deadline - time.monotonic()) * _WAIT_SHARE
        self._waiting += 1
        try:
            return await asyncio.wait_for(self._free.get(), wait_s)
        except TimeoutError:
            raise _busy(f"no replica was free within {wait_s:.3g} s") from None
        finally:
            self._waiting -= 1


def _busy(problem: str) -> ServiceError:
    return ServiceError(ErrorReason.SERVER_BUSY, f"{problem}; try again later")
