"""Payloads of tensors and images as received: validated before torch sees them.

Every size is a Python integer, so nothing overflows, and memory is allocated only for sizes that the
plan declared and the limits allow.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Generic, TypeVar

import numpy as np

from trocar_api.reasons import ErrorReason
from trocar_api.wire import Chunk
from trocar_server.config import Limits
from trocar_server.engine.request.plan import Payload
from trocar_server.engine.schedule.admission import Reservation
from trocar_server.errors import ServiceError

MAX_RANK = 8

Message = TypeVar("Message")


def tensor_byte_count(field: str, shape: Sequence[int], itemsize: int) -> int:
    """Return the bytes of a tensor of this shape.

    Raises:
        ServiceError: `INVALID_TENSOR` for a rank over 8 or a negative size.
    """
    if len(shape) > MAX_RANK:
        raise ServiceError(
            ErrorReason.INVALID_TENSOR, f"{field}: rank {len(shape)} is over {MAX_RANK}", field=field
        )
    count = itemsize
    for size in shape:
        if size < 0:
            raise ServiceError(ErrorReason.INVALID_TENSOR, f"{field}: size {size} is negative", field=field)
        count *= size
    return count


class Arrivals(Generic[Message]):
    """Incoming messages of a call, each with a bounded wait.

        arrivals = Arrivals(requests, limits, len)
        first = await arrivals.next()

    Each period of `Limits.receive_timeout_s` must bring `Limits.min_receive_rate` times as many bytes, or a
    complete chunk; only time spent waiting for the caller counts.

    Args:
        messages: Those of the call.
        limits: Provides `receive_timeout_s` and `min_receive_rate`.
        size: Returns the bytes of a message.
    """

    def __init__(
        self, messages: AsyncIterator[Message], limits: Limits, size: Callable[[Message], int]
    ) -> None:
        self._messages, self._size = messages, size
        self._timeout_s = self._left_s = limits.receive_timeout_s
        self._least_bytes = min(limits.max_chunk_bytes, limits.min_receive_rate * limits.receive_timeout_s)
        self._byte_count = 0

    async def next(self) -> Message | None:
        """Return the next message; None at the end.

        Raises:
            ServiceError: `DEADLINE_EXCEEDED`, the caller sent too little for too long.
        """
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        message = await _awaited(self._messages, self._left_s, self._timeout_s)
        self._left_s -= loop.time() - began_at
        self._byte_count += 0 if message is None else self._size(message)
        if self._byte_count >= self._least_bytes:
            self._left_s, self._byte_count = self._timeout_s, 0
        return message


async def _awaited(messages: AsyncIterator[Message], left_s: float, timeout_s: float) -> Message | None:
    """Return the next message of a caller within `left_s` of its `timeout_s`, in seconds; None at the end."""
    try:
        async with asyncio.timeout(left_s):
            return await anext(messages, None)
    except TimeoutError:
        raise ServiceError(
            ErrorReason.DEADLINE_EXCEEDED,
            f"too little of the request arrived within {timeout_s:.6g} s; the call was ended. Send its parts "
            "without a pause, and smaller ones over a slow line",
        ) from None


async def only_message(messages: AsyncIterator[bytes], timeout_s: float) -> bytes:
    """Read the single message of a call.

    gRPC (1.81, asyncio) itself leaves a call without a message unanswered until its deadline.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, there are more or none; `DEADLINE_EXCEEDED`, it does not arrive or
            the caller does not half-close.
    """
    message = await _awaited(messages, timeout_s, timeout_s)
    if message is None:
        raise ServiceError(ErrorReason.INVALID_ARGUMENT, "the call has no message; this method takes one")
    if await _awaited(messages, timeout_s, timeout_s) is not None:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT, "the call has several messages; this method takes one"
        )
    return message


async def receive(
    arrivals: Arrivals[bytes],
    byte_counts: Sequence[int],
    chunks: Sequence[Chunk],
    chunks_of: Callable[[bytes], Sequence[Chunk]],
    reservation: Reservation,
) -> list[Payload]:
    """Receive the payloads of a call, assembled from the chunks of its messages.

    Args:
        arrivals: The messages after the first.
        byte_counts: The size of each payload, as announced.
        chunks: Those of the first message.
        chunks_of: Reads those of a further message.
        reservation: The reservation; grows by the received bytes.

    Raises:
        ServiceError: `INVALID_TENSOR`, they are not as announced; `DEADLINE_EXCEEDED`, they do not arrive;
            `SERVER_BUSY`.
    """
    receiver = PayloadReceiver(byte_counts)
    reservation.grow(receiver.feed(chunks))
    while not receiver.is_complete and (message := await arrivals.next()) is not None:
        reservation.grow(receiver.feed(chunks_of(message)))
    return receiver.finish()


def are_whole(byte_counts: Sequence[int], chunks: Sequence[Chunk]) -> bool:
    """Whether every payload has come, each in one chunk and in order."""
    if len(chunks) != len(byte_counts):
        return False
    for index, (chunk, count) in enumerate(zip(chunks, byte_counts, strict=True)):
        if not chunk.data.nbytes == count > 0 or chunk.payload_index != index or chunk.offset_bytes:
            return False
    return True


def whole_payloads(chunks: Sequence[Chunk]) -> list[Payload]:
    """Copy the payloads of a call out of its message; see `are_whole`."""
    payloads: list[Payload] = []
    for _, _, data in chunks:
        payloads.append(np.array(np.frombuffer(data, np.uint8)))
    return payloads


class PayloadReceiver:
    """Assembles the payloads of one call from chunks in order.

    receiver = PayloadReceiver([602112])
    receiver.feed(chunks)
    payloads = receiver.finish()
    """

    def __init__(self, byte_counts: Sequence[int]) -> None:
        self._payloads: list[Payload] = [np.empty(count, np.uint8) for count in byte_counts]
        self._index = 0
        self._offset = 0
        self.is_complete = False
        """Whether every byte has come."""
        self._skip_full()

    def feed(self, chunks: Iterable[Chunk]) -> int:
        """Copy chunks to their places, and return their bytes.

        Raises:
            ServiceError: `INVALID_TENSOR` when a chunk is not the next range of bytes.
        """
        byte_count = 0
        for chunk in chunks:
            self._check(chunk)
            byte_count += chunk.data.nbytes
            end = self._offset + chunk.data.nbytes
            self._payloads[self._index][self._offset : end] = np.frombuffer(chunk.data, np.uint8)
            self._offset = end
            self._skip_full()
        return byte_count

    def finish(self) -> list[Payload]:
        """Return the payloads.

        Raises:
            ServiceError: `INVALID_TENSOR` when bytes are missing.
        """
        if not self.is_complete:
            raise _wrong(
                f"payload {self._index} ends after {self._offset:,} of "
                f"{self._payloads[self._index].nbytes:,} bytes; "
                "shape and dtype must match the bytes that are sent"
            )
        return self._payloads

    def _check(self, chunk: Chunk) -> None:
        if self.is_complete:
            raise _wrong("more bytes were sent than shape and dtype account for")
        if (chunk.payload_index, chunk.offset_bytes) != (self._index, self._offset):
            raise _wrong(
                f"expected payload {self._index} from byte {self._offset:,}, "
                f"got payload {chunk.payload_index} from byte {chunk.offset_bytes:,}"
            )
        room = self._payloads[self._index].nbytes - self._offset
        if not 0 < chunk.data.nbytes <= room:
            raise _wrong(
                f"payload {self._index}: a chunk of {chunk.data.nbytes:,} bytes where {room:,} are missing; "
                "shape and dtype must match the bytes that are sent"
            )

    def _skip_full(self) -> None:
        while self._index < len(self._payloads) and self._offset == self._payloads[self._index].nbytes:
            self._index, self._offset = self._index + 1, 0
        self.is_complete = self._index == len(self._payloads)


def _wrong(problem: str) -> ServiceError:
    return ServiceError(ErrorReason.INVALID_TENSOR, problem, field="chunks")
