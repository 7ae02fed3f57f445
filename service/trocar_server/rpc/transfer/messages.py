"""Messages of a call: parsed without protobuf's copies, received with a bounded wait, and sent with one.

Payloads are validated before torch sees them. Every size is a Python integer, so nothing overflows, and
memory is allocated only for sizes that the plan declared and the limits allow.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import grpc
import numpy as np
from google.protobuf.message import DecodeError, Message
from numpy.typing import NDArray

from trocar_api.reasons import ErrorReason
from trocar_api.wire import Chunk, Layout, WireError, split_message
from trocar_server.config import Limits
from trocar_server.engine.schedule.admission import Reservation
from trocar_server.errors import ServiceError

Head = TypeVar("Head", bound=Message)
Meaning = TypeVar("Meaning")
Item = TypeVar("Item")
"""A message of a stream, as bytes or parsed."""

Payload: TypeAlias = NDArray[np.uint8]
"""As that of the engine's plans; a gateway imports this module, and no torch."""

CallContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""gRPC's context of a call."""

MAX_MESSAGE_BYTES = 16 << 20
"""The largest message of our own services: a chunk of at most 8 MiB, or a description. gRPC lets larger ones
through, for the Open Inference Protocol; a parsed one can be many times as large in memory."""

COMPRESSION_KEY = "x-reply-compression"
"""Metadata key to request gzip; gRPC's own header of the request never reaches a handler (grpcio 1.81)."""

_KEPT_SIZES, _KEPT_OF_SIZE = 64, 4
_MOST_FIXED_BYTES = 4096
"""Size limit of a kept message, without its chunks' data."""


class Known(NamedTuple, Generic[Meaning]):
    """A message as known from an earlier one, with chunks of its own."""

    meaning: Meaning
    chunks: list[Chunk]
    layout: Layout


class KnownMessages(Generic[Meaning]):
    """The meaning of earlier messages: one that is equal but for the data of its chunks is not parsed.

        known = messages.find(message)
        if known is None:
            messages.keep(message, chunks, meaning)

    The most recent ones are kept, a few of each size. For one event loop.

    Args:
        varying: Number of a field that may also differ in content; see `Layout`.
    """

    def __init__(self, varying: int = 0) -> None:
        self._varying = varying
        self._by_size: OrderedDict[int, list[tuple[Layout, Meaning]]] = OrderedDict()

    def find(self, message: bytes) -> Known[Meaning] | None:
        """Return what a message is known to mean; None if none was equal."""
        for layout, meaning in self._by_size.get(len(message), ()):
            chunks = layout.chunks(message)
            if chunks is not None:
                return Known(meaning, chunks, layout)
        return None

    def keep(self, message: bytes, chunks: Iterable[Chunk], meaning: Meaning) -> None:
        """Keep the meaning of a message that was read, with its chunks."""
        if len(message) - sum(chunk.data.nbytes for chunk in chunks) > _MOST_FIXED_BYTES:
            return  # before each of its fields is looked at again
        layout = Layout.of(message, self._varying)
        if layout is None:
            return
        others = [kept for kept in self._by_size.get(len(message), ()) if kept[0].chunks(message) is None]
        self._by_size[len(message)] = [(layout, meaning), *others][:_KEPT_OF_SIZE]
        self._by_size.move_to_end(len(message))
        if len(self._by_size) > _KEPT_SIZES:
            self._by_size.popitem(last=False)


def check_size(message: bytes, limit: int = MAX_MESSAGE_BYTES) -> None:
    """Refuse a message before it is parsed.

    Raises:
        ServiceError: `REQUEST_TOO_LARGE`.
    """
    if len(message) > limit:
        raise ServiceError(
            ErrorReason.REQUEST_TOO_LARGE,
            f"the message is {len(message):,} bytes, the limit is {limit:,}; send tensors in smaller chunks",
            byte_count=str(len(message)),
            limit=str(limit),
        )


def read_message(kind: type[Head], message: bytes) -> tuple[Head, list[Chunk]]:
    """Split a message into everything but its chunks, parsed, and its chunks as views.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, the bytes are not such a message; `REQUEST_TOO_LARGE`.
    """
    head, chunks = split_head(kind, message)
    return parse_head(kind, head), chunks


def split_head(kind: type[Message], message: bytes) -> tuple[bytes, list[Chunk]]:
    """Split a message into the bytes of everything but its chunks, and its chunks as views.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, the bytes are not a message; `REQUEST_TOO_LARGE`.
    """
    check_size(message)
    try:
        return split_message(message)
    except WireError as error:
        raise _not_a_message(kind, error) from None


def parse_head(kind: type[Head], head: bytes) -> Head:
    """Parse what `split_head` returned.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, the bytes are not such a message.
    """
    try:
        return kind.FromString(head)
    except DecodeError as error:
        raise _not_a_message(kind, error) from None


def _not_a_message(kind: type[Message], error: Exception) -> ServiceError:
    """Error for bytes that are not a message of the expected type."""
    return ServiceError(ErrorReason.INVALID_ARGUMENT, f"the message is not a {kind.DESCRIPTOR.name}: {error}")


def deadline_of(context: CallContext) -> float | None:
    """Deadline of a call, as a time of `time.monotonic()` in seconds; None without one."""
    remaining_s: float | None = context.time_remaining()  # None without a deadline, whatever its type says
    return None if remaining_s is None else time.monotonic() + remaining_s


class Arrivals(Generic[Item]):
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

    def __init__(self, messages: AsyncIterator[Item], limits: Limits, size: Callable[[Item], int]) -> None:
        self._messages, self._size = messages, size
        self._timeout_s = self._left_s = limits.receive_timeout_s
        self._least_bytes = min(limits.max_chunk_bytes, limits.min_receive_rate * limits.receive_timeout_s)
        self._byte_count = 0

    async def next(self) -> Item | None:
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


async def _awaited(messages: AsyncIterator[Item], left_s: float, timeout_s: float) -> Item | None:
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


async def only_message(
    messages: AsyncIterator[bytes], timeout_s: float, half_close_timeout_s: float, limit: int | None
) -> bytes:
    """Read the single message of a call.

    gRPC (1.81, asyncio) itself leaves a call without a message unanswered until its deadline.

    Args:
        messages: Those of the call.
        timeout_s: The longest wait for the message, in seconds.
        half_close_timeout_s: The longest wait for the half-close behind it, which clients send along.
            Meanwhile the message takes memory that no budget counts.
        limit: The most bytes of the message; gRPC's own limit where None.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, there are more or none; `DEADLINE_EXCEEDED`, it does not arrive or
            the caller does not half-close; `REQUEST_TOO_LARGE`.
    """
    message = await _awaited(messages, timeout_s, timeout_s)
    if message is None:
        raise ServiceError(ErrorReason.INVALID_ARGUMENT, "the call has no message; this method takes one")
    if limit is not None:
        check_size(message, limit)
    if await _awaited(messages, half_close_timeout_s, half_close_timeout_s) is not None:
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


def compress_if_asked(context: CallContext) -> None:
    """Compress the messages of the reply if the caller requests gzip; call it before the first is sent."""
    for key, value in context.invocation_metadata() or ():
        if key == COMPRESSION_KEY and value == "gzip":
            context.set_compression(grpc.Compression.Gzip)


async def send(context: CallContext, messages: Iterable[Item], stall_timeout_s: float) -> None:
    """Send messages in order, each once the previous one is sent; stop if the caller does not read.

    Args:
        context: The call's context.
        messages: The messages.
        stall_timeout_s: The timeout of one message, in seconds.

    Raises:
        ServiceError: `DEADLINE_EXCEEDED`, nothing was read for that long.
    """
    for message in messages:
        try:
            async with asyncio.timeout(stall_timeout_s):
                await context.write(message)
        except TimeoutError:
            raise ServiceError(
                ErrorReason.DEADLINE_EXCEEDED,
                f"the reply was not read for {stall_timeout_s:.6g} s; the call was ended",
            ) from None
