"""HTTP/2 by hand, as far as one gRPC call needs it: to send what gRPC's own clients never would."""

import socket
import struct
from collections.abc import Iterator

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _GOAWAY, _WINDOW_UPDATE = 0, 1, 3, 4, 7, 8
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_STREAM = 1
_FRAME_BYTES = 16_384
_TIMEOUT_S = 60


def grpc_call(port: int, path: str, message: bytes, encoding: str) -> bytes:
    """Send one message that is compressed already, and return the header blocks of the answer.

    Args:
        port: Of a server on 127.0.0.1.
        path: `/package.Service/Method`.
        message: As it goes over the wire.
        encoding: What it says it is compressed with.
    """
    with socket.create_connection(("127.0.0.1", port), _TIMEOUT_S) as peer:
        peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, b""))
        peer.sendall(_frame(_HEADERS, _END_HEADERS, _STREAM, _headers(path, encoding)))
        frames = _frames(peer)
        body = struct.pack(">BI", 1, len(message)) + message
        return _send(peer, frames, body)


def _send(peer: socket.socket, frames: Iterator[tuple[int, int, int, bytes]], body: bytes) -> bytes:
    windows, position, found = {0: 65_535, _STREAM: 65_535}, 0, b""
    while True:
        while position < len(body) and (room := min(*windows.values(), _FRAME_BYTES)) > 0:
            piece = body[position : position + room]
            position += len(piece)
            peer.sendall(_frame(_DATA, _END_STREAM * (position == len(body)), _STREAM, piece))
            for stream in windows:
                windows[stream] -= len(piece)
        kind, flags, stream, payload = next(frames, (_GOAWAY, 0, 0, b""))
        if kind == _WINDOW_UPDATE:
            windows[stream] += struct.unpack(">I", payload)[0]
        elif kind == _SETTINGS and not flags & _ACK:
            for number, value in struct.iter_unpack(">HI", payload):
                if number == 4:  # the initial window of a stream
                    windows[_STREAM] += value - 65_535
            peer.sendall(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _HEADERS:
            found += payload
        if kind in (_RST_STREAM, _GOAWAY) or (kind == _HEADERS and flags & _END_STREAM):
            return found


def _frames(peer: socket.socket) -> Iterator[tuple[int, int, int, bytes]]:
    with peer.makefile("rb") as reader:
        while len(head := reader.read(9)) == 9:
            length, kind, flags, stream = int.from_bytes(head[:3]), head[3], head[4], head[5:]
            yield kind, flags, int.from_bytes(stream) & 0x7FFFFFFF, reader.read(length)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3) + struct.pack(">BBI", kind, flags, stream) + payload


def _headers(path: str, encoding: str) -> bytes:
    """Encode headers as literals without an index (RFC 7541, 6.2.2)."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
        "grpc-encoding": encoding,
    }
    encoded = b""
    for name, value in fields.items():
        encoded += bytes((0, len(name))) + name.encode() + bytes((len(value),)) + value.encode()
    return encoded
