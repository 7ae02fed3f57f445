"""Byte counting: messages of a call are parsed, serialised and counted as bytes within the call.

gRPC itself would answer unparsable bytes with UNKNOWN, without reporting their count.
"""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import DecodeError

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.rpc.call.method_scopes import is_open
from trocar_server.rpc.transfer.compression import MAGIC, unpacked
from trocar_server.rpc.transfer.messages import CallContext, check_size
from trocar_server.telemetry import CallRecord

Behaviour = Callable[[Any, Any], Awaitable[Any]]
"""RPC behaviour: takes a request, or an iterator of them, and the context; returns or writes the reply."""

KINDS = {
    (False, False): "UNARY",
    (False, True): "SERVER_STREAMING",
    (True, False): "CLIENT_STREAMING",
    (True, True): "BIDI_STREAMING",
}
"""Method kind in metrics, by whether its requests and its replies are streams."""


@dataclass(frozen=True)
class Method:
    """A registered method, as found at its first call.

    Attributes:
        name: `/package.Service/Method`.
        handler: gRPC's.
        kind: Its kind in metrics.
        is_open: Whether it is open to every caller.
        writes: Whether the behaviour writes its replies, and returns nothing.
        behaviour: Takes a request, or an iterator of them, and the context; returns or writes the reply.
    """

    name: str
    handler: Any
    kind: str
    is_open: bool
    writes: bool
    behaviour: Behaviour

    @classmethod
    def of(cls, name: str, handler: Any) -> "Method":
        """Describe a handler: its one behaviour is its `unary_stream`, for example."""
        requests = "stream" if handler.request_streaming else "unary"
        replies = "stream" if handler.response_streaming else "unary"
        kind = KINDS[handler.request_streaming, handler.response_streaming]
        behaviour = _writing(getattr(handler, f"{requests}_{replies}"))
        return cls(name, handler, kind, is_open(name), handler.response_streaming, behaviour)

    def called(self, record: CallRecord, message: Any, context: CallContext) -> Awaitable[Any]:
        """Call the behaviour with what it takes; see `serialized` for what it returns.

        Args:
            record: The call's record, which counts bytes.
            message: The one message, or an iterator of them where requests are streams.
            context: gRPC's.
        """
        handler = self.handler
        parse = handler.request_deserializer
        is_stream = handler.request_streaming
        request = Requests(record, message, parse) if is_stream else _parsed(record, message, parse)
        if not self.writes:
            return self.behaviour(request, context)
        return self.behaviour(request, CountedContext(record, context, handler.response_serializer))

    def serialized(self, record: CallRecord, reply: Any) -> Any:
        """Return a reply as counted bytes."""
        serialize = self.handler.response_serializer
        data = reply if serialize is None else serialize(reply)
        record.messages_out += 1
        record.bytes_out += len(data)
        return data


def _writing(behaviour: Any) -> Behaviour:
    """Wrap a behaviour that yields its replies, such as reflection's, as one that writes them."""
    if not inspect.isasyncgenfunction(behaviour):
        return behaviour  # type: ignore[no-any-return]

    async def write(request: Any, context: CallContext) -> None:
        async for reply in behaviour(request, context):
            await context.write(reply)

    return write


def _parsed(record: CallRecord, message: bytes, parse: Callable[[bytes], Any] | None) -> Any:
    record.messages_in += 1
    record.bytes_in += len(message)
    if message.startswith(MAGIC):
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
    """The messages of a request stream, each counted and parsed on arrival."""

    def __init__(
        self, record: CallRecord, messages: AsyncIterator[bytes], parse: Callable[[bytes], Any] | None
    ) -> None:
        self._record, self._parse = record, parse
        self._messages = messages
        self._arriving: AsyncIterator[bytes] | None = None
        """Made with the first message: gRPC (1.81) warns of one that a refused call never reads."""

    def __aiter__(self) -> "Requests":
        return self

    async def __anext__(self) -> Any:
        if self._arriving is None:
            self._arriving = aiter(self._messages)
        return _parsed(self._record, await anext(self._arriving), self._parse)


class CountedContext:
    """Call context that serialises and counts messages, around gRPC's."""

    def __init__(
        self, record: CallRecord, context: CallContext, serialize: Callable[[Any], bytes] | None
    ) -> None:
        self._record, self._context, self._serialize = record, context, serialize
        self.invocation_metadata, self.time_remaining = context.invocation_metadata, context.time_remaining

    async def write(self, message: Any) -> None:
        """Send a message."""
        data = message if self._serialize is None else self._serialize(message)
        self._record.messages_out += 1
        self._record.bytes_out += len(data)
        await self._context.write(data)

    def __getattr__(self, name: str) -> Any:
        """Delegate everything else to gRPC's context."""
        return getattr(self._context, name)
