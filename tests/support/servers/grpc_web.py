"""A client of gRPC-Web, as a browser is one: plain HTTP/1.1."""

import http.client
import struct
from contextlib import closing
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

TIMEOUT_S = 60.0
CONTENT_TYPE = "application/grpc-web+proto"


@dataclass(frozen=True)
class WebReply:
    """What a call returned."""

    messages: list[bytes]
    code: int
    details: str


def get(url: str, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Make one plain request; return status, headers in small letters and body."""
    with _connection(url) as connection:
        connection.request(method, path, headers=headers)
        reply = connection.getresponse()
        return reply.status, {key.lower(): value for key, value in reply.getheaders()}, reply.read()


def framed(*messages: bytes) -> bytes:
    """Return messages as the body of a request."""
    return b"".join(struct.pack(">BI", 0, len(message)) + message for message in messages)


def web_call(url: str, method: str, *messages: bytes, **headers: str) -> WebReply:
    """Make one call."""
    return post(url, method, framed(*messages), **headers)


def post(url: str, method: str, body: bytes, **headers: str) -> WebReply:
    """Send a body to a method.

    Raises:
        AssertionError: The reply is not gRPC-Web.
    """
    with _connection(url) as connection:
        connection.request("POST", f"/{method}", body, {"content-type": CONTENT_TYPE, **headers})
        reply = connection.getresponse()
        assert reply.status == 200, (reply.status, reply.read())
        assert reply.getheader("content-type") == CONTENT_TYPE
        return _read(reply.read())


def _read(body: bytes) -> WebReply:
    messages: list[bytes] = []
    at = 0
    while at < len(body):
        flags, length = struct.unpack_from(">BI", body, at)
        content = body[at + 5 : at + 5 + length]
        at += 5 + length
        if flags:
            fields = dict(line.split(": ", 1) for line in content.decode().strip().split("\r\n"))
            assert at == len(body), "trailers come last"
            return WebReply(messages, int(fields["grpc-status"]), unquote(fields.get("grpc-message", "")))
        messages.append(content)
    raise AssertionError("the reply has no trailers")


def _connection(url: str) -> closing[http.client.HTTPConnection]:
    return closing(http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S))
