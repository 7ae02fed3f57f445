"""Incoming batches of a stream: each complete, or with its error."""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import stream_pb2 as pb
from trocar_api.wire import Chunk
from trocar_server.config import Limits
from trocar_server.engine.request.plan import Payload, Plan, row_count
from trocar_server.engine.schedule.admission import Reservation
from trocar_server.errors import ServiceError
from trocar_server.processing.inputs import ProcessorInput
from trocar_server.rpc.codec.inputs import to_inputs
from trocar_server.rpc.transfer.messages import Arrivals, PayloadReceiver, read_message
from trocar_server.rpc.transfer.stored_batches import StoredBatches, StoredInputs

_BUSY_PAUSE_S = 0.1
_MOST_BUSY_S = 10.0
"""How long a partial batch waits for memory, in seconds: streams could wait for each other forever."""

_Message = tuple[pb.ExtractStreamRequest, list[Chunk]]


@dataclass
class StreamBatch:
    """One batch: its inputs, or its own error."""

    index: int
    plan: Plan
    payloads: Sequence[Payload] = field(default_factory=list)
    byte_count: int = 0
    """Its reservation."""
    error: ServiceError | None = None


class StreamReader:
    """Reads the messages of a stream: its start, then one batch after another.

    reader = StreamReader(requests, limits, reservation)
    start, chunks = await reader.start()
    async for batch in reader.batches(plan, start.first_batch_index): ...

    Args:
        messages: Those of the call.
        limits: The limits of a batch.
        reservation: The reservation for the bytes of batches. The consumer of a batch releases them.
    """

    def __init__(self, messages: AsyncIterator[bytes], limits: Limits, reservation: Reservation) -> None:
        self.stored: StoredBatches | None = None
        """Reads batches that are on the server; None refuses them."""
        self._messages = messages
        self._limits = limits
        self._reservation = reservation
        self._arrivals = Arrivals(messages, limits, len)
        self._seen: _Message | None = None
        self._is_skipping = False
        self._received_bytes = 0

    async def start(self) -> tuple[pb.ExtractStreamStart, list[Chunk]]:
        """Start message of the stream, and its chunks.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, there is none, or it does not begin a stream.
        """
        first, self._seen = await self._look(), None
        if first is None or first[0].WhichOneof("part") != "start":
            raise _wrong("the first message of a stream has `start`")
        return first[0].start, first[1]

    async def payloads(self, byte_counts: Sequence[int], chunks: Sequence[Chunk]) -> list[Payload]:
        """Payloads of the part that was started last.

        Args:
            byte_counts: The size of each.
            chunks: Those of its first message; more are read as long as bytes are missing.

        Raises:
            ServiceError: `INVALID_TENSOR`, they are not as announced.
        """
        receiver = PayloadReceiver(byte_counts)
        self._received_bytes = 0
        await self._grow(receiver.feed(chunks))
        while not receiver.is_complete:
            message = await self._look()
            if message is None or message[0].WhichOneof("part") is not None:
                break
            self._seen = None
            await self._grow(receiver.feed(message[1]))
        return receiver.finish()

    async def batches(self, plan: Plan, first_index: int) -> AsyncGenerator[StreamBatch, None]:
        """Yield every batch, in order; an invalid batch carries its error.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, a message does not belong to a stream, or is out of order.
        """
        index, idle_bytes = first_index, self._reservation.byte_count
        while (taken := await self._take(idle_bytes)) is not None:
            message, chunks = taken
            if message.WhichOneof("part") is None and self._is_skipping:
                continue
            if message.WhichOneof("part") != "batch":
                raise _wrong("expected a batch, received another message")
            if message.batch.batch_index != index:
                raise _wrong(f"batch {index} expected, received batch {message.batch.batch_index}")
            yield await self._batch(plan, message.batch, chunks, idle_bytes)
            index += 1

    async def _batch(
        self, plan: Plan, message: pb.StreamBatch, chunks: Sequence[Chunk], idle_bytes: int
    ) -> StreamBatch:
        self._is_skipping = False
        self._received_bytes = 0
        try:
            unprocessed: list[ProcessorInput] = []
            stored = await self._stored(message)
            entries = message.inputs if stored is None else stored.messages
            inputs, byte_counts = to_inputs(entries, self._limits, unprocessed)
            byte_count, rows = sum(byte_counts), row_count(inputs)
            await _when_free(lambda: self._reservation.check(byte_count, rows, kept_bytes=idle_bytes))
            self._arrivals = Arrivals(self._messages, self._limits, len)
            if stored is None:
                payloads = await self.payloads(byte_counts, chunks)
            else:
                await self._grow(byte_count)
                payloads = stored.payloads
            plan_of_batch = replace(plan, inputs=inputs, unprocessed=tuple(unprocessed))
            return StreamBatch(message.batch_index, plan_of_batch, payloads, byte_count)
        except ServiceError as error:
            self._reservation.add(-self._received_bytes)
            if error.reason is ErrorReason.DEADLINE_EXCEEDED:  # the caller has stalled: end the stream
                raise
            self._is_skipping = True  # skip the rest of its messages
            return StreamBatch(message.batch_index, plan, error=error.with_traceback(None))

    async def _stored(self, message: pb.StreamBatch) -> StoredInputs | None:
        """Return the inputs of a batch that is on the server; None of another.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, it has inputs as well; and what `StoredBatches.read` raises.
        """
        if not message.HasField("stored"):
            return None
        if message.inputs or self.stored is None:
            raise _wrong("a batch has either inputs or stored samples, and stored ones in a stream only")
        return await self.stored.read(message.stored)

    async def _grow(self, byte_count: int) -> None:
        """Reserve received bytes; nothing is read until they fit."""
        await _when_free(lambda: self._reservation.grow(byte_count), _MOST_BUSY_S)
        self._received_bytes += byte_count

    async def _look(self) -> _Message | None:
        """Peek at the next message; None at the end."""
        if self._seen is None:
            self._seen = _parsed(await self._arrivals.next())
        return self._seen

    async def _take(self, idle_bytes: int) -> _Message | None:
        """Return the next message; it may take long while earlier batches run."""
        seen, self._seen = self._seen, None
        if seen is not None:
            return seen
        reading = asyncio.ensure_future(anext(self._messages, None))
        try:
            while not (await asyncio.wait((reading,), timeout=self._limits.stall_timeout_s))[0]:
                if self._reservation.byte_count <= idle_bytes:
                    raise ServiceError(
                        ErrorReason.DEADLINE_EXCEEDED,
                        f"no batch arrived for {self._limits.stall_timeout_s:.6g} s; the stream was ended",
                    )
            return _parsed(reading.result())
        finally:
            if not reading.done():
                reading.cancel()
                with suppress(asyncio.CancelledError):
                    await reading


async def _when_free(take: Callable[[], None], most_s: float = math.inf) -> None:
    """Wait for memory: nothing is read meanwhile, and running batches need no more of it.

    Args:
        take: Reserves it.
        most_s: The longest wait, in seconds.

    Raises:
        ServiceError: `SERVER_BUSY`, after that; what else `take` raises.
    """
    ends_at = time.monotonic() + most_s
    while True:
        try:
            return take()
        except ServiceError as error:
            if error.reason is not ErrorReason.SERVER_BUSY or time.monotonic() > ends_at:
                raise
        await asyncio.sleep(_BUSY_PAUSE_S)


def _parsed(message: bytes | None) -> _Message | None:
    return None if message is None else read_message(pb.ExtractStreamRequest, message)


def _wrong(problem: str) -> ServiceError:
    return ServiceError(ErrorReason.INVALID_ARGUMENT, problem)
