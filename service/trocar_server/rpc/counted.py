"""Messages of a call as bytes on our side of gRPC: parsed, serialised and counted within the call.

gRPC itself would answer bytes that are no message with UNKNOWN, and tell nobody how many there were.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from google.protobuf.message import DecodeError

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.rpc.compression import unpacked
from trocar_server.rpc.messages import check_size
from trocar_server.telemetry import CallRecord

Behaviour = Callable[[Any, Any], Awaitable[Any]]
"""Takes a request, or an iterator of them, and the context; returns the reply, or writes to the context."""

KINDS = {
    (False, False): "UNARY",
    (False, True): "SERVER_STREAMING",
    (True, False): "CLIENT_STREAMING",
    (True, True): "BIDI_STREAMING",
}
"""What metrics call a method, by whether its requests and its replies are streams."""


def behaviour_of(handler: Any) -> tuple[str, Any]:
    """Return the name of a handler's one behaviour, such as `unary_stream`, and the behaviour."""
    requests = "stream" if handler.request_streaming else "unary"
    replies = "stream" if handler.response_streaming else "unary"
    name = f"{requests}_{replies}"
    return name, getattr(handler, name)


def counted(handler: Any) -> Callable[[CallRecord, Any, Any], Awaitable[Any]]:
    """Return a handler's behaviour as a coroutine of bytes, which counts them in a call's record."""
    behaviour = _writing(behaviour_of(handler)[1])
    parse, serialize = handler.request_deserializer, handler.response_serializer
    is_stream, answers_stream = handler.request_streaming, handler.response_streaming

    async def call(record: CallRecord, message: Any, context: Any) -> Any:
        request = Requests(record, message, parse) if is_stream else _parsed(record, message, parse)
        if answers_stream:
            await behaviour(request, CountedContext(record, context, serialize))
            return None
        reply = await behaviour(request, context)
        data = reply if serialize is None else serialize(reply)
        record.sent(len(data))
        return data

    return call


def _writing(behaviour: Any) -> Behaviour:
    """Turn a behaviour that yields its replies, as reflection's, into one that writes them."""
    if not inspect.isasyncgenfunction(behaviour):
        return behaviour  # type: ignore[no-any-return]

    async def write(request: Any, context: Any) -> None:
        async for reply in behaviour(request, context):
            await context.write(reply)

    return write


def _parsed(record: CallRecord, message: bytes, parse: Callable[[bytes], Any] | None) -> Any:
    record.received(len(message))
    message = unpacked(message)
    if parse is None:
        return message
    check_size(message)
    try:
        request = parse(message)
    except DecodeError:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT, "the message is not the request of this method"
        ) from None
    named = getattr(request, "model_id", "") or getattr(request, "trainer_id", "")
    if named:
        record.name_model(named)
    return request


class Requests:
    """The messages of a request stream, each counted and parsed as it comes."""

    def __init__(
        self, record: CallRecord, messages: AsyncIterator[bytes], parse: Callable[[bytes], Any] | None
    ) -> None:
        self._record, self._parse = record, parse
        self._messages = aiter(messages)

    def __aiter__(self) -> "Requests":
        return self

    async def __anext__(self) -> Any:
        return _parsed(self._record, await anext(self._messages), self._parse)


class CountedContext:
    """gRPC's context of a call, whose messages are serialised and counted here."""

    def __init__(self, record: CallRecord, context: Any, serialize: Callable[[Any], bytes] | None) -> None:
        self._record, self._context, self._serialize = record, context, serialize

    async def write(self, message: Any) -> None:
        """Send a message."""
        data = message if self._serialize is None else self._serialize(message)
        self._record.sent(len(data))
        await self._context.write(data)

    def __getattr__(self, name: str) -> Any:
        """Leave everything else to gRPC's."""
        return getattr(self._context, name)
