"""gzip decompression of requests, within bounds; `sending` has the compression of replies.

Note: [Bounded decompression]
    gRPC (1.81) applies the message limit to the compressed size, and decompresses without checking the
    result: 1 MiB became 1 GiB, took 4 GiB at its peak and reached the handler. So its own decompression is
    off (`OPTIONS`), we get messages as sent, and stop at the limit. A message of protobuf cannot begin with
    gzip's first byte, which would be wire type 7.
"""

import zlib
from collections.abc import Iterator

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

MAX_BYTES = 16 << 20
"""Maximum decompressed size of a message: that of a message with the largest chunks."""

OPTIONS = [
    ("grpc.per_message_decompression", 0),
    # None and gzip: with "deflate" we could not detect whether a message is compressed.
    ("grpc.compression_enabled_algorithms_bitset", 0b101),
]
"""gRPC options of a server; see Note: [Bounded decompression]."""

_PIECE_BYTES = 1 << 20
_SIZE_BYTES = 4
MAGIC = b"\x1f\x8b"
"""First bytes of a compressed message."""
_WITH_GZIP_HEADER = 31


def unpacked(message: bytes) -> bytes:
    """Decompress a message, if it is compressed.

    Raises:
        ServiceError: `REQUEST_TOO_LARGE`, or `INVALID_ARGUMENT` for invalid gzip data.
    """
    if not message.startswith(MAGIC):
        return message
    if int.from_bytes(message[-_SIZE_BYTES:], "little") > MAX_BYTES:  # the size that its trailer states
        raise _too_large()
    pieces: list[bytes] = []
    try:
        for piece in _pieces(message):
            pieces.append(piece)
            if len(pieces) > MAX_BYTES // _PIECE_BYTES:
                raise _too_large()
        return b"".join(pieces)
    finally:
        pieces.clear()  # otherwise an error's traceback keeps them alive


def _pieces(message: bytes) -> Iterator[bytes]:
    """Decompress a message in pieces; every piece but the last is full."""
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


def _damaged() -> ServiceError:
    return ServiceError(ErrorReason.INVALID_ARGUMENT, "a compressed message is damaged", field="message")


def _too_large() -> ServiceError:
    problem = f"a message unpacks to more than {MAX_BYTES:,} bytes"
    return ServiceError(ErrorReason.REQUEST_TOO_LARGE, problem, field="message")
