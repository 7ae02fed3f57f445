"""gzip: replies for callers who ask for it, and requests unpacked within bounds.

Note: [Who unpacks]
    gRPC (1.81) holds the limit of messages against what comes over the wire, and unpacks before it asks how
    much that makes: 1 MiB became 1 GiB, took 4 GiB at its peak and reached the handler. So its own unpacking
    is off (`OPTIONS`), messages come to us as they are, and we stop at the limit. A message of protobuf
    cannot begin with gzip's first byte, which would be wire type 7.
"""

import zlib
from collections.abc import Iterator
from typing import Any

import grpc

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

MAX_BYTES = 16 << 20
"""What one message may become: the most that a message of the largest chunks has."""

OPTIONS = [
    ("grpc.per_message_decompression", 0),
    # None and gzip: of what "deflate" makes we could not tell whether it is compressed.
    ("grpc.compression_enabled_algorithms_bitset", 0b101),
]
"""Of a server's channels; see Note: [Who unpacks]."""

HEADER = "x-reply-compression"
"""What a caller asks with; gRPC's own header of the request never reaches a handler (grpcio 1.81)."""

_PIECE_BYTES = 1 << 20
_SIZE_BYTES = 4
_MAGIC = b"\x1f\x8b"
_WITH_GZIP_HEADER = 31


def unpacked(message: bytes) -> bytes:
    """Return a message without its compression, if it has one.

    Raises:
        ServiceError: `REQUEST_TOO_LARGE`, or `INVALID_ARGUMENT` for what is no gzip.
    """
    if not message.startswith(_MAGIC):
        return message
    if int.from_bytes(message[-_SIZE_BYTES:], "little") > MAX_BYTES:  # what it says itself, at its end
        raise _too_large()
    pieces: list[bytes] = []
    try:
        for piece in _pieces(message):
            pieces.append(piece)
            if len(pieces) > MAX_BYTES // _PIECE_BYTES:
                raise _too_large()
        return b"".join(pieces)
    finally:
        pieces.clear()  # an error's traceback would keep them


def _pieces(message: bytes) -> Iterator[bytes]:
    """Unpack a message bit by bit; every piece but the last is full."""
    unpacker = zlib.decompressobj(_WITH_GZIP_HEADER)
    rest = message
    try:
        while piece := unpacker.decompress(rest, _PIECE_BYTES):
            yield piece
            rest = unpacker.unconsumed_tail
    except zlib.error:
        raise _damaged() from None
    if not unpacker.eof or unpacker.unused_data:
        raise _damaged()


def compress_if_asked(context: "grpc.aio.ServicerContext[Any, Any]") -> None:
    """Compress the messages of the reply where the caller wants gzip; before the first one goes out."""
    for key, value in context.invocation_metadata() or ():
        if key == HEADER and value == "gzip":
            context.set_compression(grpc.Compression.Gzip)


def _damaged() -> ServiceError:
    return ServiceError(ErrorReason.INVALID_ARGUMENT, "a message is compressed, and damaged", field="message")


def _too_large() -> ServiceError:
    problem = f"a message unpacks to more than {MAX_BYTES:,} bytes"
    return ServiceError(ErrorReason.REQUEST_TOO_LARGE, problem, field="message")
