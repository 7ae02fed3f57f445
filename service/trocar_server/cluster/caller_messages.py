"""Messages of a caller, kept as long as they are few, so that a call can be sent to another replica."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc

KEPT_BYTES = 8 << 20
"""Above this a call cannot be sent again."""

_PEEK_S = 0.001


class CallerMessages:
    """The messages of one call.

        messages = CallerMessages(requests)
        first = await messages.first()
        await messages.send_to(call)            # and once more to another one, if `can_repeat`

    Args:
        source: gRPC's iterator. It is read ahead by one message at most.
    """

    def __init__(self, source: AsyncIterator[bytes]) -> None:
        self._source = aiter(source)
        self._kept: list[bytes] = []
        self._pending: asyncio.Task[bytes | None] | None = None
        self._is_at_end = False
        self.can_repeat = True
        """Whether every message that came is kept."""

    async def first(self) -> bytes | None:
        """Wait for the first message, or None."""
        if not self._kept and not self._is_at_end:
            message = await anext(self._source, None)
            self._is_at_end = message is None
            if message is not None:
                self._kept.append(message)
        return self._kept[0] if self._kept else None

    async def is_single(self) -> bool:
        """Whether the first message is the only one, as far as that is known within a millisecond."""
        if not self._is_at_end and len(self._kept) == 1 and self._pending is None:
            pending = self._reading()
            await asyncio.wait((pending,), timeout=_PEEK_S)
            self._is_at_end = pending.done() and pending.result() is None
        return self._is_at_end and len(self._kept) < 2

    async def send_to(self, call: Any) -> None:
        """Send every message to a call: those that came, and the others as they come."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # it has ended, with a status
            for message in tuple(self._kept):
                await call.write(message)
            self._keep()
            while (later := await self._next()) is not None:
                self._keep(later)
                await call.write(later)
            await call.done_writing()

    async def _next(self) -> bytes | None:
        """Wait for a message of the caller; None at the end.

        Whoever waits may be cancelled: the read goes on, as an iterator of gRPC cannot be read again after
        that, and the next one to wait gets its message.
        """
        if self._is_at_end:
            return None
        pending = self._reading()
        await asyncio.wait((pending,))
        self._pending = None
        self._is_at_end = pending.result() is None
        return pending.result()

    def _reading(self) -> "asyncio.Task[bytes | None]":
        """The read that is under way."""
        if self._pending is None:
            self._pending = asyncio.ensure_future(self._read())
        return self._pending

    async def _read(self) -> bytes | None:
        return await anext(self._source, None)

    def _keep(self, *messages: bytes) -> None:
        """Keep messages, or none any more if they are too many."""
        if not self.can_repeat:
            return
        self._kept.extend(messages)
        if sum(map(len, self._kept)) > KEPT_BYTES:
            self.can_repeat = False
            self._kept.clear()

    def close(self) -> None:
        """Stop reading."""
        if self._pending is not None:
            self._pending.cancel()
