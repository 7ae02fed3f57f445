"""Messages that carry tensors, read without protobuf's copies."""

import time
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from trocar_api.reasons import ErrorReason
from trocar_api.wire import Chunk, WireError, split_message
from trocar_server.errors import ServiceError

Head = TypeVar("Head", bound=Message)


def read_message(kind: type[Head], message: bytes) -> tuple[Head, list[Chunk]]:
    """Split a message into everything but its chunks, parsed, and its chunks as views.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, the bytes are no such message.
    """
    try:
        head, chunks = split_message(message)
        return kind.FromString(head), chunks
    except (WireError, DecodeError) as error:
        problem = f"the message is no {kind.DESCRIPTOR.name}: {error}"
        raise ServiceError(ErrorReason.INVALID_ARGUMENT, problem) from None


def deadline_of(context: "grpc.aio.ServicerContext[Any, Any]") -> float | None:
    """Return when a call has to end, as a time of `time.monotonic()` in seconds; None for never."""
    remaining_s: float | None = context.time_remaining()  # None without a deadline, whatever its type says
    return None if remaining_s is None else time.monotonic() + remaining_s
