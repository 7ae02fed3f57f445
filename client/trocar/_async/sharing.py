"""Shared memory for call payloads, with asyncio: opened on first use, abandoned on any doubt."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from trocar._base.concurrency import AsyncLock, async_compute
from trocar._transport.exchange import AsyncExchange, ExchangeEndedError
from trocar._transport.segments import (
    PAYLOADS_SHARED_FROM_BYTES,
    REPLY_SHARED_FROM_BYTES,
    ReplySizes,
    SegmentPool,
    copy_payloads,
    map_segment,
    segment_size,
)
from trocar._wire.requests import ExtractCall
from trocar._wire.shared_calls import NOTHING, Borrowed, own_range
from trocar_api.v1.extraction_pb2 import ExtractRequest
from trocar_api.v1.shared_memory_pb2 import OpenSegment, ShareMemoryRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from trocar._base.tensors import Bytes
    from trocar._transport.segments import Segment
    from trocar._wire.replies import ReplyAssembler

_LONG_PAUSE_S = 60.0
"""How long a server that lends nothing is not asked again."""
_SHORT_PAUSE_S = 1.0
"""The same for one that lends no more, as much is in use."""


class AsyncSharing:
    """Shared memory of one connection.

    Args:
        open_exchange: Opens the lease, the call that keeps segments lent; None without shared memory.
    """

    def __init__(self, open_exchange: Callable[[], AsyncExchange] | None) -> None:
        self._open_exchange = open_exchange
        self._exchange: AsyncExchange | None = None
        self._pool = SegmentPool()
        self._opening = AsyncLock()
        self._again_at = 0.0
        self._sizes = ReplySizes()

    @property
    def is_used(self) -> bool:
        """Whether segments are lent now."""
        exchange = self._exchange
        return exchange is not None and exchange.is_alive and len(self._pool) > 0

    async def borrow(self, request: ExtractCall, reply: ReplyAssembler) -> Borrowed:
        """Return the call to make, and the segments borrowed for it."""
        if self._open_exchange is None:
            return NOTHING
        expected = self._sizes.expected.get(hash(request.head), 0)
        wants_payload = request.byte_count >= PAYLOADS_SHARED_FROM_BYTES
        wants_reply = max(expected, reply.out_byte_count) >= REPLY_SHARED_FROM_BYTES
        if not (wants_payload or wants_reply):
            return NOTHING
        await self._check_alive()
        borrowed, fields = Borrowed(self._pool), ExtractRequest()
        try:
            if wants_payload:
                await self._lend_payload(request, borrowed, fields)
            if wants_reply:
                await self._lend_reply(expected, reply, borrowed, fields)
        except BaseException:
            borrowed.discard()
            raise
        payloads = [] if fields.HasField("shared_payload") else request.payloads
        borrowed.call = ExtractCall(request.head + fields.SerializeToString(), payloads)
        return borrowed

    def learn(self, request: ExtractCall, reply: ReplyAssembler) -> None:
        """Record the size of the reply to a request."""
        if self._open_exchange is not None:
            self._sizes.learn(request.head, reply.byte_counts)

    async def array(self, byte_count: int) -> Bytes | None:
        """Return bytes in a dedicated segment, or None."""
        await self._check_alive()
        segment = await self._segment(byte_count)
        return None if segment is None else self._pool.lend(segment)[:byte_count]

    def reset(self) -> None:
        """Drop every lent segment."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.close()
        self._pool.end()
        self._pool = SegmentPool()

    async def _lend_payload(self, request: ExtractCall, borrowed: Borrowed, fields: ExtractRequest) -> None:
        place = borrowed.pool.find(request.payloads[0]) if len(request.payloads) == 1 else None
        if place is None:
            borrowed.payload = await self._segment(request.byte_count)
            if borrowed.payload is None:
                return
            place = borrowed.payload.range(request.byte_count)
            await async_compute(copy_payloads, request.payloads, borrowed.payload.array())
        fields.shared_payload.CopyFrom(place)

    async def _lend_reply(
        self, expected: int, reply: ReplyAssembler, borrowed: Borrowed, fields: ExtractRequest
    ) -> None:
        place = own_range(borrowed.pool, reply, expected)
        if place is not None:
            fields.shared_reply.CopyFrom(place)
            reply.offer(reply.own_bytes)
            return
        byte_count = expected or reply.out_byte_count
        borrowed.reply = await self._segment(byte_count)
        if borrowed.reply is not None:
            fields.shared_reply.CopyFrom(borrowed.reply.range(byte_count))
            reply.offer(partial(borrowed.pool.lend, borrowed.reply))

    async def _check_alive(self) -> None:
        exchange = self._exchange
        if exchange is not None and not exchange.is_alive:
            async with self._opening:
                if self._exchange is exchange:
                    self.reset()

    async def _segment(self, byte_count: int) -> Segment | None:
        result = self._pool.take(byte_count)
        if result is not None:
            return result
        async with self._opening:
            result = self._pool.take(byte_count)  # another call may have returned one meanwhile
            if result is not None or self._open_exchange is None or time.monotonic() < self._again_at:
                return result
            try:
                return await self._open(byte_count)
            except (ExchangeEndedError, OSError, ValueError):
                self.reset()
                self._again_at = time.monotonic() + _LONG_PAUSE_S
                return None
            except BaseException:  # an answer that nobody read would pass for that of the next message
                self.reset()
                raise

    async def _open(self, byte_count: int) -> Segment | None:
        assert self._open_exchange is not None  # requested before
        exchange = self._exchange = self._exchange or self._open_exchange()
        for segment_id in self._pool.discarded():
            await exchange.ask(ShareMemoryRequest(close=segment_id))
        wish = ShareMemoryRequest(open=OpenSegment(byte_count=segment_size(byte_count)))
        answer = await exchange.ask(wish)
        if answer.HasField("refused") and self._pool.discard_free():
            for segment_id in self._pool.discarded():
                await exchange.ask(ShareMemoryRequest(close=segment_id))
            answer = await exchange.ask(wish)
        if answer.HasField("refused"):
            self._again_at = time.monotonic() + (_SHORT_PAUSE_S if len(self._pool) else _LONG_PAUSE_S)
            return None
        segment = await async_compute(map_segment, answer.segment)
        await exchange.ask(ShareMemoryRequest(mapped=segment.id))
        self._pool.add(segment)
        return segment
