"""Tensor messages, read without protobuf's copies."""

import time
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from trocar_api.reasons import ErrorReason
from trocar_api.wire import Chunk, WireError, split_message
from trocar_server.errors import ServiceError

Head = TypeVar("Head", bound=Message)

CallContext: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""gRPC's context of a call."""

MAX_MESSAGE_BYTES = 16 << 20
"""The largest message of our own services: a chunk of at most 8 MiB, or a description. gRPC lets larger ones
through, for the Open Inference Protocol; a parsed one can be many times as large in memory."""


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
