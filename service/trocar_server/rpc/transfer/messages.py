"""Tensor messages, read without protobuf's copies."""

import time
from collections import OrderedDict
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from trocar_api.reasons import ErrorReason
from trocar_api.wire import Chunk, Layout, WireError, split_message
from trocar_server.errors import ServiceError

Head = TypeVar("Head", bound=Message)
Meaning = TypeVar("Meaning")

CallContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""gRPC's context of a call."""

MAX_MESSAGE_BYTES = 16 << 20
"""The largest message of our own services: a chunk of at most 8 MiB, or a description. gRPC lets larger ones
through, for the Open Inference Protocol; a parsed one can be many times as large in memory."""


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
            messages.keep(message, meaning)

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

    def keep(self, message: bytes, meaning: Meaning) -> None:
        """Keep the meaning of a message that was read."""
        layout = Layout.of(message, self._varying)
        if layout is None or layout.fixed_byte_count > _MOST_FIXED_BYTES:
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
