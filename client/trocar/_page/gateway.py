"""The gateway: an ASGI application that serves the page and passes its calls to a gRPC server.

A call of the page is gRPC-Web. Its messages and its token go on unread, and the server decides: token,
scopes, quotas, limits and fairness are those of every other client.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import grpc.aio

from trocar._page.assets import read_assets
from trocar._page.frames import CONTENT_TYPE, FramingError, message_frame, messages, trailers_frame
from trocar._page.origins import Origins
from trocar._transport.channel import MAX_MESSAGE_BYTES, AsyncChannel, new_request_id, own_version
from trocar._transport.early_status import async_status_kept
from trocar_api.versions import VERSION_KEY

if TYPE_CHECKING:
    from trocar._transport.channel import AsyncStreamStream

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Fields: TypeAlias = Sequence[tuple[bytes, bytes]]

MAX_BODY_BYTES = 256 << 20
"""The most bytes of one request."""

MAX_CALLS = 64
"""The most calls at a time; more are refused with RESOURCE_EXHAUSTED."""

BODY_TIMEOUT_S = 20.0
"""How long the gateway waits for the next part of a request."""

REPLY_TIMEOUT_S = 60.0
"""How long a browser may leave the next part of a reply unread."""

MIN_BODY_RATE = 16 << 10
"""Bytes in a second, on average over `BODY_TIMEOUT_S`, below which a request is ended, as in a server."""

_CALL_TIMEOUT_S = 600.0
_SERVICES = ("trocar_api.v1.", "grpc.health.v1.Health")
_FORWARDED = (b"authorization", b"x-request-id")
_ONCE = frozenset(
    {
        *(b"host", b"origin", b"sec-fetch-site", b"sec-fetch-mode", b"sec-fetch-dest"),
        *(b"content-type", b"content-length"),
        *_FORWARDED,
    }
)
"""Headers that decide who calls and what; given twice, proxies and servers read them otherwise."""
_UNFORWARDED_TRAILERS = ("grpc-status", "grpc-message")

_SECURITY_HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
        b"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
_REPLY_FIELDS = ((b"content-type", CONTENT_TYPE.encode()), (b"cache-control", b"no-store"))


class Gateway:
    """An ASGI application: the page's files, and gRPC-Web calls that go on to a server.

    Args:
        channel: Connection to the server.
        origins: Who may call.
    """

    def __init__(self, channel: AsyncChannel, origins: Origins) -> None:
        self._channel = channel
        self._origins = origins
        self._assets = read_assets()
        self._calls: set[_Call] = set()

    def end_calls(self) -> None:
        """End the calls that are under way; their replies say why."""
        for call in self._calls:
            call.end()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await _answer_lifespan(receive, send)
        elif scope["type"] == "http":
            await self._answer(scope, receive, send)
        # Other protocols (websocket) end here: the HTTP server refuses what is not accepted.

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["http_version"].startswith("2"):  # Hypercorn (0.18) takes it in plain text, too
            return await _send_text(send, 505, "the page speaks HTTP/1.1")
        twice = _repeated(scope["headers"])
        if twice:
            return await _send_text(send, 400, f"the header {twice} is given twice")
        headers: dict[bytes, bytes] = dict(scope["headers"])
        refusal = self._origins.refusal(scope["method"], headers)
        if refusal is not None:
            return await _send_text(send, 403, refusal)
        if scope["method"] in ("GET", "HEAD"):
            return await self._send_asset(scope, headers, send)
        if scope["method"] == "POST":
            return await self._forward(scope["path"], headers, receive, send)
        return await _send_text(send, 405, "the page takes GET, HEAD and POST")

    async def _send_asset(self, scope: Scope, headers: Mapping[bytes, bytes], send: Send) -> None:
        asset = self._assets.get(scope["path"])
        if asset is None:
            return await _send_text(send, 404, "there is no such file")
        fields = [
            (b"content-type", asset.content_type.encode()),
            (b"etag", asset.etag.encode()),
            (b"cache-control", b"no-cache"),
        ]
        if headers.get(b"if-none-match", b"").decode("latin-1") == asset.etag:
            return await _send_reply(send, 304, fields, b"")
        fields.append((b"content-length", str(len(asset.content)).encode()))
        return await _send_reply(send, 200, fields, b"" if scope["method"] == "HEAD" else asset.content)

    async def _forward(self, path: str, headers: Mapping[bytes, bytes], receive: Receive, send: Send) -> None:
        if headers.get(b"content-type", b"").decode("latin-1") != CONTENT_TYPE:
            return await _send_text(send, 415, f"calls are {CONTENT_TYPE}")
        if not path.startswith(tuple(f"/{service}" for service in _SERVICES)) or path.count("/") != 2:
            return await _send_text(send, 404, "there is no such method")
        if int(headers.get(b"content-length", b"0") or b"0") > MAX_BODY_BYTES:
            return await _send_text(send, 413, f"a request has at most {MAX_BODY_BYTES} bytes")
        wrong = _unsendable(headers)
        if wrong:
            allowed = "letters without accents, digits and signs"
            return await _send_text(send, 400, f"the header {wrong} may have {allowed} only")
        if len(self._calls) >= MAX_CALLS:
            busy = trailers_frame(
                grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], f"the page has {MAX_CALLS} calls under way"
            )
            return await _send_reply(send, 200, _REPLY_FIELDS, busy)
        call = _Call(self._channel, path, headers, receive, send)
        self._calls.add(call)
        try:
            await call.run()
        finally:
            self._calls.remove(call)
        return None


class _Call:
    """One call of the page, passed on message by message.

    Args:
        channel: Connection to the server.
        path: `/package.Service/Method`.
        headers: Of the HTTP request.
        receive: The request's body.
        send: Takes the reply.
    """

    def __init__(
        self, channel: AsyncChannel, path: str, headers: Mapping[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        self._method: AsyncStreamStream = channel.stream_stream(path, None, None)
        self._metadata = _metadata(headers)
        self._receive, self._send = receive, send
        self._problem: tuple[grpc.StatusCode, str] | None = None
        self._is_sent = asyncio.Event()
        self._call: grpc.aio.StreamStreamCall[bytes, bytes] | None = None

    async def run(self) -> None:
        """Make the call, and end it when the browser goes."""
        call = self._call = self._method(self._requests(), timeout=_CALL_TIMEOUT_S, metadata=self._metadata)
        watch = asyncio.create_task(self._cancel_when_gone(call))
        try:
            await self._reply(call)
        finally:
            watch.cancel()
            call.cancel()
            with suppress(asyncio.CancelledError):
                await watch

    def end(self) -> None:
        """End the call from this side; the browser may make it again."""
        self._problem = (grpc.StatusCode.UNAVAILABLE, "the page was closed")
        if self._call is not None:
            self._call.cancel()

    async def _requests(self) -> AsyncIterator[bytes]:
        try:
            async for message in messages(self._parts(), MAX_MESSAGE_BYTES):
                yield message
        except (FramingError, TimeoutError) as error:
            text = str(error) or f"no byte of the request came for {BODY_TIMEOUT_S:.0f} s"
            self._problem = (grpc.StatusCode.INVALID_ARGUMENT, text)
            raise
        finally:
            self._is_sent.set()

    async def _parts(self) -> AsyncIterator[bytes]:
        count, is_more = 0, True
        pace = _Pace()
        while is_more:
            with pace:
                async with asyncio.timeout(BODY_TIMEOUT_S):
                    event = await self._receive()
            if event["type"] == "http.disconnect":
                raise FramingError("the request was not finished")
            part: bytes = event.get("body", b"")
            count += len(part)
            if count > MAX_BODY_BYTES:
                raise FramingError(f"a request has at most {MAX_BODY_BYTES} bytes")
            is_more = event.get("more_body", False)
            if is_more:
                pace.check(len(part))
            yield part

    async def _cancel_when_gone(self, call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> None:
        await self._is_sent.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        call.cancel()

    async def _reply(self, call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> None:
        await _begin_reply(self._send, 200, _REPLY_FIELDS)
        end = b""
        try:
            end = await self._messages(call)
        except asyncio.CancelledError:
            if self._problem is None:
                raise
        if self._problem is not None:
            code, text = self._problem
            end = trailers_frame(code.value[0], text)
        await self._send({"type": "http.response.body", "body": end})

    async def _messages(self, call: "grpc.aio.StreamStreamCall[bytes, bytes]") -> bytes:
        """Pass on the messages of the reply, and return the frame that ends it."""
        try:
            async for message in async_status_kept(call):
                part = {"type": "http.response.body", "body": message_frame(message), "more_body": True}
                async with asyncio.timeout(REPLY_TIMEOUT_S):
                    await self._send(part)
        except grpc.aio.AioRpcError as error:
            trailers = _shown(error.trailing_metadata())
            return trailers_frame(error.code().value[0], error.details() or "", trailers)
        return trailers_frame(0, "", _shown(await call.trailing_metadata()))


class _Pace:
    """The pace of a request: its bytes, and the time for which they were waited for, as its context."""

    def __init__(self) -> None:
        self._waited_s, self._byte_count, self._began_s = 0.0, 0, 0.0

    def __enter__(self) -> None:
        self._began_s = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._waited_s += time.monotonic() - self._began_s

    def check(self, byte_count: int) -> None:
        """Count the bytes of a part, and refuse a request that comes drop by drop.

        Raises:
            FramingError: It came too slowly since the last check that looked.
        """
        self._byte_count += byte_count
        if self._waited_s < BODY_TIMEOUT_S:
            return
        if self._byte_count < MIN_BODY_RATE * self._waited_s:
            raise FramingError(f"the request comes at less than {MIN_BODY_RATE:,} bytes a second")
        self._waited_s, self._byte_count = 0.0, 0


def _repeated(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return a header that may be given once, and is given twice; empty if none is."""
    seen: set[bytes] = set()
    for name, _ in headers:
        if name in _ONCE and name in seen:
            return name.decode("latin-1")
        seen.add(name)
    return ""


def _unsendable(headers: Mapping[bytes, bytes]) -> str:
    """Return a header that is passed on, and that gRPC would refuse as metadata; empty if none is."""
    texts = {key.decode(): headers.get(key, b"").decode("latin-1") for key in _FORWARDED}
    return next((key for key, text in texts.items() if not (text.isascii() and text.isprintable())), "")


def _metadata(headers: Mapping[bytes, bytes]) -> tuple[tuple[str, str], ...]:
    given = {key.decode(): headers[key].decode("latin-1") for key in _FORWARDED if key in headers}
    return tuple({"x-request-id": new_request_id(), VERSION_KEY: own_version(), **given}.items())


def _shown(metadata: Any) -> list[tuple[str, str | bytes]]:
    """Return trailing metadata as the page may see it."""
    return [(key, value) for key, value in metadata or () if key not in _UNFORWARDED_TRAILERS]


async def _send_text(send: Send, status: int, text: str) -> None:
    content = f"{text}\n".encode()
    fields = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(content)).encode()),
    ]
    await _send_reply(send, status, fields, content)


async def _begin_reply(send: Send, status: int, fields: Fields) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [*_SECURITY_HEADERS, *fields]})


async def _send_reply(send: Send, status: int, fields: Fields, content: bytes) -> None:
    await _begin_reply(send, status, fields)
    await send({"type": "http.response.body", "body": content})


async def _answer_lifespan(receive: Receive, send: Send) -> None:
    while True:
        event = await receive()
        await send({"type": f"{event['type']}.complete"})
        if event["type"] == "lifespan.shutdown":
            return
