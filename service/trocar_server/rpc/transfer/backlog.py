"""Backlog: messages that are made while their caller reads earlier ones, or does not."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeAlias

from trocar_api.reasons import ErrorReason
from trocar_server.engine.schedule.admission import Reservation
from trocar_server.errors import ServiceError
from trocar_server.rpc.codec.replies import Parts
from trocar_server.rpc.transfer.prefetch import prefetch

_Sized: TypeAlias = tuple[list[Parts], int]

MOST_BYTES = 16 << 20
"""Bytes of the messages that wait for a caller before their maker waits, too."""
PATIENCE_S = 5.0
"""How long their maker waits, in seconds: it keeps what other callers could use."""


class Backlog:
    """Messages of one call, made ahead of a caller who reads slowly.

        backlog = Backlog(reservation)
        async with aclosing(backlog.messages(make(backlog))) as messages:
            async for message in messages:
                await send(message)

    Their maker waits only when they exceed `MOST_BYTES` or the memory of the call's caller, and not longer
    than `PATIENCE_S` from one `begin` to the next. Then it is closed, and the caller gets the error behind
    the messages that wait. For one event loop.

    Args:
        reservation: Grows by the bytes that wait.
    """

    def __init__(self, reservation: Reservation) -> None:
        self._reservation = reservation
        self._waiting_count = 0
        self._byte_count = 0
        self._changed = asyncio.Event()
        self._left_s = PATIENCE_S

    def begin(self) -> None:
        """Begin a part for which the maker may wait anew."""
        self._left_s = PATIENCE_S

    async def messages(self, source: AsyncGenerator[list[Parts], None]) -> AsyncGenerator[list[Parts], None]:
        """Yield what a source makes, in order, while a task of its own makes the next.

        Args:
            source: The maker; closed when this ends, also by an error.

        Raises:
            ServiceError: `DEADLINE_EXCEEDED`, the caller has not read for too long; any error of the source.
        """
        try:
            async with aclosing(prefetch(self._made(source), depth=0)) as ahead:
                async for message, size in ahead:
                    self._waiting_count -= 1
                    yield message
                    del message  # otherwise it stays alive during the wait for the next
                    self._add(-size)
        finally:
            self._add(-self._byte_count)

    async def _made(self, source: AsyncGenerator[list[Parts], None]) -> AsyncGenerator[_Sized, None]:
        async with aclosing(source):
            async for message in source:
                size = sum(memoryview(part).nbytes for parts in message for part in parts)
                self._waiting_count += 1
                self._add(size)
                yield message, size
                del message
                await self._room()

    @property
    def _is_full(self) -> bool:
        """Whether the maker has to wait; never for a message that nothing waits before."""
        is_large = self._byte_count > MOST_BYTES or self._reservation.free_bytes() < 0
        return is_large and self._waiting_count > 0

    async def _room(self) -> None:
        """Wait until there is room for the next message.

        Raises:
            ServiceError: `DEADLINE_EXCEEDED`, the caller has not read for too long.
        """
        if not self._is_full:
            return
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        try:
            async with asyncio.timeout(self._left_s):
                while self._is_full:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise ServiceError(
                ErrorReason.DEADLINE_EXCEEDED,
                f"{self._byte_count:,} bytes wait to be read, and were waited for longer than "
                f"{PATIENCE_S:g} s; the run was ended, so that its keys and values are free for others. Read "
                "faster, or ask for fewer or narrower values (positions=, cast=)",
            ) from None
        finally:
            self._left_s = max(0.0, self._left_s - (loop.time() - began_at))

    def _add(self, byte_count: int) -> None:
        self._byte_count += byte_count
        self._reservation.add(byte_count)
        self._changed.set()
