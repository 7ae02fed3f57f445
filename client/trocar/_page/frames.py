"""gRPC-Web framing: messages and trailers in one HTTP body.

A frame is one byte of flags, four bytes of length (big-endian) and that many bytes; the highest flag marks
trailers, written as HTTP headers. Source: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-WEB.md
"""

import struct
from base64 import b64encode
from collections.abc import AsyncIterator, Iterable
from urllib.parse import quote

CONTENT_TYPE = "application/grpc-web+proto"

_PREFIX = struct.Struct(">BI")
_MESSAGE, _TRAILERS = 0x00, 0x80
_UNQUOTED = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")


class FramingError(ValueError):
    """A body is no sequence of frames."""


def message_frame(message: bytes) -> bytes:
    """Return one message as a frame."""
    return _PREFIX.pack(_MESSAGE, len(message)) + message


def trailers_frame(code: int, details: str, metadata: Iterable[tuple[str, str | bytes]] = ()) -> bytes:
    """Return the frame that ends a reply: the status, and binary metadata in base64."""
    lines = [f"grpc-status: {code}"]
    if details:
        lines.append(f"grpc-message: {quote(details, safe=_UNQUOTED)}")
    for key, value in metadata:
        text = b64encode(value).decode().rstrip("=") if isinstance(value, bytes) else value
        lines.append(f"{key}: {text}")
    block = "".join(f"{line}\r\n" for line in lines).encode()
    return _PREFIX.pack(_TRAILERS, len(block)) + block


async def messages(parts: AsyncIterator[bytes], max_bytes: int) -> AsyncIterator[bytes]:
    """Yield the messages of a body, as its parts arrive.

    Args:
        parts: The body.
        max_bytes: The most bytes of one message.

    Raises:
        FramingError: The body ends within a frame, or a frame is no message or too large.
    """
    buffer = bytearray()
    async for part in parts:
        buffer += part
        while len(buffer) >= _PREFIX.size:
            flags, length = _PREFIX.unpack_from(buffer)
            if flags != _MESSAGE:
                raise FramingError(f"a frame has flags {flags:#x}; messages have {_MESSAGE:#x}")
            if length > max_bytes:
                raise FramingError(f"a message has {length} bytes, more than the {max_bytes} allowed")
            end = _PREFIX.size + length
            if len(buffer) < end:
                break
            yield bytes(memoryview(buffer)[_PREFIX.size : end])
            del buffer[:end]
    if buffer:
        raise FramingError("the body ends within a frame")
