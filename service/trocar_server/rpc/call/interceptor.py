"""Interceptor of every call: authorization, request id, errors as statuses, one log line, observers.

Messages are parsed, serialised and counted as bytes within the call: gRPC itself would answer unparsable
bytes with UNKNOWN, without reporting their count.
"""

import asyncio
import inspect
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import structlog
from google.protobuf.message import DecodeError

from trocar_api.descriptors import DESCRIPTOR_BYTES
from trocar_api.reasons import ErrorReason
from trocar_api.versions import VERSION_KEY
from trocar_server import __version__
from trocar_server.config import Limits
from trocar_server.errors import ServiceError
from trocar_server.models import current_principal, set_flow, set_principal
from trocar_server.rpc.call.authorization import Authorizer, OpenAuthorizer
from trocar_server.rpc.call.drain import OWN, DrainSwitch, refused_unknown
from trocar_server.rpc.call.forwarded import original
from trocar_server.rpc.call.method_scopes import is_open
from trocar_server.rpc.call.principal import flow_of, log_name
from trocar_server.rpc.call.repeated import was_done_before
from trocar_server.rpc.call.running_calls import RunningCall, RunningCalls
from trocar_server.rpc.call.status import DETAILS_KEY, STATUS_CODES, status_details, status_message
from trocar_server.rpc.transfer.compression import MAGIC, unpacked
from trocar_server.rpc.transfer.messages import MAX_MESSAGE_BYTES, CallContext, check_size, only_message
from trocar_server.telemetry import NOBODY, UNKNOWN_METHOD, CallLines, CallObserver, CallRecord, trace_id_of

Result = TypeVar("Result")

REQUEST_ID_KEY = "x-request-id"
_MAX_REQUEST_ID_CHARACTERS = 64
_CLOCKS_APART_S = 0.05
_GONE = grpc.aio.BaseError
"""What gRPC (1.81) raises for a send on a call that its caller, or the end of the server, has ended: several
subclasses, one of them private. It logs these with a traceback, and nothing for a cancelled handler."""
_OPEN_TIMEOUT_S = 10.0
"""The longest wait for the message of an unauthenticated call, and for its half-close, in seconds."""
_MAX_OPEN_BYTES = 1 << 10
"""The largest message of an unauthenticated call: it names a service."""
_LIMITS = Limits()


Behaviour = Callable[[Any, Any], Awaitable[Any]]
"""RPC behaviour: takes a request, or an iterator of them, and the context; returns or writes the reply."""

KINDS = {
    (False, False): "UNARY",
    (False, True): "SERVER_STREAMING",
    (True, False): "CLIENT_STREAMING",
    (True, True): "BIDI_STREAMING",
}
"""Method kind in metrics, by whether its requests and its replies are streams."""


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Authorizes every call except health checks, and wraps every handler.

    Args:
        log: Gets one line for each call except health checks; structlog's logger `trocar` when None.
        authorizer: Authorizes calls; all are authorized when None.
        observer: Notified of every call, including health checks and unknown methods.
        drain_switch: The drain state and version checks, independent of the caller.
        running: Registry of running calls.
        limits: Provides `stall_timeout_s` and `receive_timeout_s`, the longest waits for the message of a
            call that has a single one, and for the half-close after it.
        gateway_key: The key of the gateways of a cluster; without gateways empty.
    """

    def __init__(
        self,
        log: Any = None,
        authorizer: Authorizer | None = None,
        observer: CallObserver = NOBODY,
        drain_switch: DrainSwitch | None = None,
        running: RunningCalls | None = None,
        limits: Limits = _LIMITS,
        gateway_key: str = "",
    ) -> None:
        self._log = log or structlog.get_logger("trocar")
        self._lines = CallLines(self._log)
        self._limits = limits
        self._gateway_key = gateway_key
        self._authorizer = authorizer or OpenAuthorizer()
        self._observer = observer
        self._drain_switch = drain_switch or DrainSwitch()
        self._running = running or RunningCalls(self._authorizer)
        self._methods: dict[str, Method] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the handler with its behaviour wrapped."""
        handler = await continuation(handler_call_details)
        name = str(handler_call_details.method)
        metadata = handler_call_details.invocation_metadata or ()
        headers: dict[str, Any] = dict(metadata)  # bytes only under names that end in -bin
        if handler is None:  # otherwise gRPC logs a traceback for each such call that is cancelled
            call = self._call(UNKNOWN_METHOD, "UNARY", headers, called=name)
            is_own = name.startswith(OWN)
            return call.refusal(refused_unknown(self._authorizer, name, metadata) if is_own else _not_found())
        method = self._methods.get(name)
        if method is None or method.handler is not handler:
            method = self._methods[name] = Method.of(name, handler)
        call = self._call(name, method.kind, headers, is_open=method.is_open)
        if not method.is_open:
            try:
                if self._authorizer.is_guarded:
                    self._authorizer.check_early(name, metadata)
                if self._drain_switch.is_draining or headers.get(VERSION_KEY) != __version__:
                    self._drain_switch.check(name, metadata)
            except ServiceError as error:
                return call.refusal(error)
        return call.wrapped(method)

    async def beside(
        self,
        method: str,
        context: CallContext,
        headers: Mapping[str, str],
        work: Callable[[], Awaitable[Result]],
    ) -> Result:
        """Run a call that came beside gRPC, for the caller of a call that is open, as if gRPC had brought it.

        Args:
            method: The method that it is a call of, which takes and returns streams.
            context: Context of the open call.
            headers: Request id and trace context of this call.
            work: Computes the result, in the current task.

        Raises:
            ServiceError: Why it failed; whatever was raised.
        """
        call = self._call(method, KINDS[True, True], headers)
        return await call.beside(context, self._drain_switch, work)

    def _call(
        self, method: str, kind: str, headers: Mapping[str, Any], *, is_open: bool = False, called: str = ""
    ) -> "_Call":
        traceparent = headers.get("traceparent", "")
        record = CallRecord(
            method,
            kind,
            _request_id(headers.get(REQUEST_ID_KEY, "")),
            self._observer,
            traceparent,
            headers.get("tracestate", ""),
            trace_id=trace_id_of(traceparent) if traceparent else "",
            called=called,
        )
        return _Call(
            self._lines, self._authorizer, self._running, record, self._limits, is_open, self._gateway_key
        )


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
        most_bytes: Of a single message; None where only gRPC limits it, as for the tensors of the Open
            Inference Protocol.
    """

    name: str
    handler: Any
    kind: str
    is_open: bool
    writes: bool
    behaviour: Behaviour
    most_bytes: int | None

    @classmethod
    def of(cls, name: str, handler: Any) -> "Method":
        """Describe a handler: its one behaviour is its `unary_stream`, for example."""
        requests = "stream" if handler.request_streaming else "unary"
        replies = "stream" if handler.response_streaming else "unary"
        kind = KINDS[handler.request_streaming, handler.response_streaming]
        behaviour = _writing(getattr(handler, f"{requests}_{replies}"))
        is_bounded = name.startswith(OWN) or handler.request_deserializer is not None
        most_bytes = _MAX_OPEN_BYTES if is_open(name) else MAX_MESSAGE_BYTES if is_bounded else None
        return cls(name, handler, kind, is_open(name), handler.response_streaming, behaviour, most_bytes)

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


@dataclass(frozen=True)
class _Call:
    """One call, from the arrival of its headers."""

    lines: CallLines
    authorizer: Authorizer
    running: RunningCalls
    record: CallRecord
    limits: Limits
    is_open: bool
    """Whether the method is open to every caller."""
    gateway_key: str

    def wrapped(self, method: Method) -> Any:
        """Handler of this call: on bytes, so that every failure is within the call.

        To gRPC its requests are a stream: we handle a single message that does not arrive, see
        `only_message`.
        """
        takes_one = not method.handler.request_streaming

        async def call(messages: Any, context: CallContext) -> Any:
            record = self.record
            record.begin()
            if self.gateway_key:
                context = original(context, self.gateway_key)
            running = RunningCall(record.method, context, asyncio.current_task(), self.is_open)
            self.running.calls.add(running)
            try:
                if self.is_open:
                    self.running.let_in(running)
                else:
                    principal = self.authorizer.admit(record.method, context)
                    set_principal(principal)
                    set_flow(flow_of(principal, context.peer()))
                    record.principal = log_name(principal)
                request = await self._only(messages, method.most_bytes) if takes_one else messages
                reply = await method.called(record, request, context)
                if not method.writes:
                    reply = method.serialized(record, reply)
            except BaseException as error:
                if not was_done_before(record.method, error, context):
                    await self._fail(running.problem or error, context)
                    raise
                reply = b""
            finally:
                self.running.calls.discard(running)
                if self.is_open:
                    self.running.let_out(running)
            self._end(context.code())
            return reply

        if method.handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(call)
        return grpc.stream_unary_rpc_method_handler(call)

    async def _only(self, messages: AsyncIterator[bytes], limit: int | None) -> bytes:
        """Read the single message of this call; see `only_message`."""
        if self.is_open:
            return await only_message(messages, _OPEN_TIMEOUT_S, _OPEN_TIMEOUT_S, limit)
        return await only_message(messages, self.limits.stall_timeout_s, self.limits.receive_timeout_s, limit)

    async def beside(
        self, context: CallContext, drain_switch: DrainSwitch, work: Callable[[], Awaitable[Result]]
    ) -> Result:
        """Run this call; see `CallInterceptor.beside`."""
        record = self.record
        record.begin()
        record.messages_in = record.messages_out = 1
        record.bytes_in = record.bytes_out = DESCRIPTOR_BYTES
        running = RunningCall(record.method, context, asyncio.current_task(), is_open=False)
        self.running.calls.add(running)
        try:
            if drain_switch.is_draining:
                drain_switch.check(record.method, context.invocation_metadata() or ())
            principal = self.authorizer.admit(record.method, context)
            set_principal(principal)
            set_flow(flow_of(principal, context.peer()))
            record.principal = log_name(principal)
            result = await work()
        except BaseException as error:  # noqa: BLE001 - told to the caller
            raise self._known(running.problem or error) from None
        finally:
            self.running.calls.discard(running)
        self._end(grpc.StatusCode.OK)
        return result

    def _known(self, error: BaseException) -> ServiceError:
        """End the call with an error, and return what its caller is told."""
        if isinstance(error, asyncio.CancelledError):
            self._end(grpc.StatusCode.CANCELLED)
            return ServiceError(ErrorReason.CANCELLED, "the call was cancelled")
        known = error if isinstance(error, ServiceError) else self._internal(error)
        # Frames, its causes' among them, keep the request alive until garbage collection.
        known.__traceback__ = known.__cause__ = known.__context__ = None
        self.record.principal = known.details.get("principal") or log_name(current_principal())
        self._end(STATUS_CODES[known.reason], known.reason)
        return known

    def refusal(self, error: ServiceError) -> Any:
        """Handler that refuses before it reads a byte; on the wire all four kinds are streams."""

        async def refuse(_requests: Any, context: CallContext) -> None:
            self.record.begin()
            await self._fail(error, context)

        return grpc.stream_stream_rpc_method_handler(refuse)

    async def _fail(self, error: BaseException, context: CallContext) -> None:
        """Abort the call with a status and its reason. A cancelled call or a stopping server just ends."""
        if isinstance(error, asyncio.CancelledError):
            self._end(grpc.StatusCode.DEADLINE_EXCEEDED if _is_late(context) else grpc.StatusCode.CANCELLED)
            return
        if isinstance(error, grpc.aio.AbortError):
            self._end(context.code())
            return
        if isinstance(error, _GONE):
            self._end(grpc.StatusCode.CANCELLED)
            raise asyncio.CancelledError from None
        known = self._known(error)
        code = STATUS_CODES[known.reason]
        details = ((DETAILS_KEY, status_details(known, self.record.request_id)),)
        try:
            await context.abort(code, status_message(known), trailing_metadata=details)
        except _GONE:
            raise asyncio.CancelledError from None

    def _internal(self, error: BaseException) -> ServiceError:
        request_id = self.record.request_id
        self.lines.defect(self.record, error)
        return ServiceError(
            ErrorReason.INTERNAL,
            "the server failed on this call; its log has the details under request id " + request_id,
        )

    def _end(self, code: object, reason: str = "") -> None:
        """Notify the observer before the status is sent, and log afterwards: no caller waits for our log.

        Args:
            code: The status code; None or a number, as of `context.code()`, if the handler has set none.
            reason: Of an error.
        """
        self.record.end(code.name if isinstance(code, grpc.StatusCode) else "OK", reason)
        if not self.is_open:
            self.lines.write(self.record)


def _not_found() -> ServiceError:
    """Error for an unknown method of an unknown service, as gRPC itself words it."""
    return ServiceError(ErrorReason.UNIMPLEMENTED, "Method not found!")


def _is_late(context: CallContext) -> bool:
    """Whether the deadline ended a call. The client's clock may be slightly ahead of ours."""
    remaining_s: float | None = context.time_remaining()  # None without a deadline, whatever its type says
    return remaining_s is not None and remaining_s < _CLOCKS_APART_S


def _request_id(given: str | bytes) -> str:
    """The caller's id for this call, or a new one if it is empty or not plain text."""
    if isinstance(given, str) and given and given.isprintable():
        return given[:_MAX_REQUEST_ID_CHARACTERS]
    return uuid.uuid4().hex
