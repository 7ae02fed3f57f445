"""The batches of a stream as they come in: each whole, or with what is wrong with it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field, replace

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import stream_pb2 as pb
from trocar_api.wire import Chunk
from trocar_server.config import Limits
from trocar_server.engine.admission import Reservation
from trocar_server.engine.plan import Payload, Plan, row_count
from trocar_server.errors import ServiceError
from trocar_server.rpc.inputs import to_inputs
from trocar_server.rpc.messages import read_message
from trocar_server.rpc.payloads import PayloadReceiver

_BUSY_PAUSE_S = 0.1
_Message = tuple[pb.ExtractStreamRequest, list[Chunk]]


@dataclass
class Batch:
    """One batch: its inputs, or why it fails alone."""

    index: int
    plan: Plan
    payloads: Sequence[Payload] = field(default_factory=list)
    byte_count: int = 0
    """What was reserved for it."""
    error: ServiceError | None = None


class StreamReader:
    """Reads the messages of a stream: what begins it, then one batch after another.

    reader = StreamReader(requests, limits, held)
    start, chunks = await reader.start()
    async for batch in reader.batches(plan, start.first_batch_index): ...

    Args:
        messages: Of the call.
        limits: What a batch may not exceed.
        held: What the bytes of batches are reserved in. Who takes a batch gives them back.
    """

    def __init__(self, messages: AsyncIterator[bytes], limits: Limits, held: Reservation) -> None:
        self._messages = messages
        self._limits = limits
        self._held = held
        self._seen: _Message | None = None
        self._is_skipping = False

    async def start(self) -> tuple[pb.ExtractStreamStart, list[Chunk]]:
        """Return what the first message begins, and the chunks that came with it.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, there is none, or it does not begin a stream.
        """
        first = await self._take()
        if first is None or first[0].WhichOneof("part") != "start":
            raise _wrong("the first message of a stream has `start`")
        return first[0].start, first[1]

    async def payloads(self, byte_counts: Sequence[int], chunks: Sequence[Chunk]) -> list[Payload]:
        """Return the payloads of the part that was begun last.

        Args:
            byte_counts: The size of each.
            chunks: Those that came with its first message; more are read as long as bytes are missing.

        Raises:
            ServiceError: `INVALID_TENSOR`, they are not as announced.
        """
        receiver = PayloadReceiver(byte_counts)
        receiver.feed(chunks)
        while not receiver.is_complete:
            message = await self._look()
            if message is None or message[0].WhichOneof("part") is not None:
                break
            receiver.feed(message[1])
            self._seen = None
        return receiver.finish()

    async def batches(self, plan: Plan, first_index: int) -> AsyncGenerator[Batch, None]:
        """Yield every batch, in order; what is wrong with one of them is said in it.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, a message is none of a stream, or out of order.
        """
        index = first_index
        while (taken := await self._take()) is not None:
            message, chunks = taken
            if message.WhichOneof("part") is None and self._is_skipping:
                continue
            if message.WhichOneof("part") != "batch":
                raise _wrong("a batch was due, something else came")
            if message.batch.batch_index != index:
                raise _wrong(f"batch {index} was due, batch {message.batch.batch_index} came")
            yield await self._batch(plan, message.batch, chunks)
            index += 1

    async def _batch(self, plan: Plan, message: pb.StreamBatch, chunks: Sequence[Chunk]) -> Batch:
        self._is_skipping = False
        byte_count = 0
        try:
            inputs, byte_counts = to_inputs(message.inputs, self._limits)
            await self._reserve(sum(byte_counts), row_count(inputs))
            byte_count = sum(byte_counts)
            payloads = await self.payloads(byte_counts, chunks)
            return Batch(message.batch_index, replace(plan, inputs=inputs), payloads, byte_count)
        except ServiceError as error:
            self._held.add(-byte_count)
            self._is_skipping = True  # what still comes of it
            return Batch(message.batch_index, plan, error=error.with_traceback(None))

    async def _reserve(self, byte_count: int, rows: int) -> None:
        """Wait until there is room: nothing is read meanwhile, and what is under way needs no more of it."""
        while True:
            try:
                return self._held.reserve(byte_count, rows, is_alone=True)
            except ServiceError as error:
                if error.reason is not ErrorReason.SERVER_BUSY:
                    raise
            await asyncio.sleep(_BUSY_PAUSE_S)

    async def _look(self) -> _Message | None:
        """Return the next message without taking it; None at the end."""
        if self._seen is None:
            message = await anext(self._messages, None)
            self._seen = None if message is None else read_message(pb.ExtractStreamRequest, message)
        return self._seen

    async def _take(self) -> _Message | None:
        message = await self._look()
        self._seen = None
        return message


def _wrong(problem: str) -> ServiceError:
    return ServiceError(ErrorReason.INVALID_ARGUMENT, problem)
