"""Compressed messages, unpacked up to the size that a message may have.

Note: [gRPC unpacks before it measures]
gRPC (1.81) unpacks a compressed message whole and only then compares it with the most that a message may
have: a quarter of a MiB became 256 MiB, and the process kept 540 MB of it. So the server has gRPC hand
messages over as they came (`OPTIONS`), and unpacks them itself, no further than allowed. A gzip file begins
with bytes that no protobuf message begins with (field 3 of wire type 7, which there is not), so the two
cannot be mixed up; deflate has no such mark and is switched off.
"""

import asyncio
import zlib
from collections.abc import AsyncIterator
from typing import Any

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

_IDENTITY_AND_GZIP = 1 << 0 | 1 << 2
OPTIONS = [
    ("grpc.per_message_decompression", 0),
    ("grpc.compression_enabled_algorithms_bitset", _IDENTITY_AND_GZIP),
]
"""Of the server's channel."""

_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_ELSEWHERE_BYTES = 16 << 10  # compressed; unpacking more than this takes its time


async def unpacked(message: bytes, most_bytes: int) -> bytes:
    """Return a message as it was before it was compressed, if it was.

    Args:
        message: As it came.
        most_bytes: The most that it may have.

    Raises:
        ServiceError: `REQUEST_TOO_LARGE`, or `INVALID_ARGUMENT` for a damaged one.
    """
    if not message.startswith(_GZIP_MAGIC):
        return message
    if len(message) <= _ELSEWHERE_BYTES:
        return _unpack(message, most_bytes)
    return await asyncio.to_thread(_unpack, message, most_bytes)


async def _each_unpacked(messages: AsyncIterator[bytes], most_bytes: int) -> AsyncIterator[bytes]:
    async for message in messages:
        yield await unpacked(message, most_bytes)


async def unpacked_request(request: Any, most_bytes: int) -> Any:
    """Return the one message of a call, or its stream of messages, as they were before."""
    if isinstance(request, bytes):
        return await unpacked(request, most_bytes)
    return _each_unpacked(request, most_bytes)


def _unpack(message: bytes, most_bytes: int) -> bytes:
    size = int.from_bytes(message[-4:], "little")  # as the end of a gzip file says
    if size > most_bytes:
        raise ServiceError(
            ErrorReason.REQUEST_TOO_LARGE,
            f"a compressed message holds {size:,} bytes; at most {most_bytes:,} are allowed",
        )
    unpacking = zlib.decompressobj(_GZIP_WINDOW)
    try:
        found = unpacking.decompress(message, size + 1)  # 0 would be without a limit
    except zlib.error as error:
        raise _damaged(str(error)) from None
    if not unpacking.eof:
        raise _damaged("it is cut off, or says less than it holds")
    if unpacking.unused_data:
        raise _damaged("something follows its end")
    return found


def _damaged(problem: str) -> ServiceError:
    return ServiceError(ErrorReason.INVALID_ARGUMENT, f"a compressed message cannot be unpacked: {problem}")
