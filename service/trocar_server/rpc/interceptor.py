"""Around every call: who may make it, a request id, domain errors as statuses, one log line."""

import asyncio
import inspect
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models import current_principal, set_principal
from trocar_server.rpc.doors import Doors, unknown_method
from trocar_server.rpc.gates import Gate, Metadata, OpenGate
from trocar_server.rpc.method_scopes import is_open
from trocar_server.rpc.principal import log_name
from trocar_server.rpc.running_calls import RunningCalls
from trocar_server.rpc.status import DETAILS_KEY, STATUS_CODES, status_details, status_message

_OWN = "/trocar_api."
_REQUEST_ID_KEY = "x-request-id"
_MAX_REQUEST_ID_CHARACTERS = 64


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Asks the gate about every call but those of health, and wraps every handler of ours.

    Args:
        log: Takes one line for each call; structlog's logger `trocar` when None.
        gate: Says who may make which call; everybody every one when None.
        doors: Say which calls are let in whoever makes them.
        running: Keeps the calls that are under way.
    """

    def __init__(
        self,
        log: Any = None,
        gate: Gate | None = None,
        doors: Doors | None = None,
        running: RunningCalls | None = None,
    ) -> None:
        self._log = log or structlog.get_logger("trocar")
        self._gate = gate or OpenGate()
        self._doors = doors or Doors()
        self._running = running or RunningCalls(self._gate)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the handler with its behaviour wrapped."""
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if is_open(method) or (handler is None and not method.startswith(_OWN)):
            return handler
        call = _Call(self._log, self._gate, self._running, method, _request_id(handler_call_details))
        metadata = handler_call_details.invocation_metadata or ()
        if handler is None:
            return call.refusal(self._refused_unknown(method, metadata))
        try:
            self._gate.check_early(method, metadata)
            self._doors.check(method, metadata)
        except ServiceError as error:
            return call.refusal(error)
        if not method.startswith(_OWN):
            return _guarded(handler, call) if self._gate.is_guarded else handler
        if handler.stream_stream is not None:
            return handler._replace(stream_stream=call.wrap(handler.stream_stream))
        if handler.unary_stream is not None:
            behaviour = call.wrap(_parsing(handler, handler.unary_stream))
            return handler._replace(unary_stream=behaviour, request_deserializer=None)
        if handler.stream_unary is not None:
            behaviour = call.wrap(_parsing_each(handler))
            return handler._replace(stream_unary=behaviour, request_deserializer=None)
        behaviour = call.wrap(_parsing(handler, handler.unary_unary))
        return handler._replace(unary_unary=behaviour, request_deserializer=None)

    def _refused_unknown(self, method: str, metadata: Metadata) -> ServiceError:
        """Return why a method of ours that is none cannot be called: strangers do not learn our version."""
        try:
            self._gate.check_early(method, metadata)
        except ServiceError as error:
            if error.reason is not ErrorReason.SCOPE_MISSING:
                return error
        return unknown_method(method)


def _guarded(handler: Any, call: "_Call") -> Any:
    """Ask the gate before a handler that is not ours: reflection's, which yields its replies."""
    kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    kind = next(kind for kind in kinds if getattr(handler, kind) is not None)
    behaviour = getattr(handler, kind)
    if not inspect.isasyncgenfunction(behaviour):
        return handler._replace(**{kind: call.wrap(behaviour)})

    async def admitted(request: Any, context: Any) -> AsyncIterator[Any]:
        await call.wrap(_nothing)(request, context)
        async for reply in behaviour(request, context):
            yield reply

    return handler._replace(**{kind: admitted})


async def _nothing(request: Any, context: Any) -> None:
    """Do nothing, within a wrapped call."""


def _parsing(handler: Any, behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Parse within the call: gRPC itself answers bytes that are no message with UNKNOWN."""

    async def call(message: bytes, context: Any) -> Any:
        try:
            parse = handler.request_deserializer
            request = message if parse is None else parse(message)
        except DecodeError:
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT, "the message is not the request of this method"
            ) from None
        return await behaviour(request, context)

    return call


def _parsing_each(handler: Any) -> Callable[..., Awaitable[Any]]:
    """Parse every message of a stream within the call, as `_parsing` does."""

    async def parsed(messages: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for message in messages:
            try:
                yield handler.request_deserializer(message)
            except DecodeError:
                raise ServiceError(
                    ErrorReason.INVALID_ARGUMENT, "a message is no request of this method"
                ) from None

    async def call(messages: AsyncIterator[bytes], context: Any) -> Any:
        return await handler.stream_unary(parsed(messages), context)

    return call


@dataclass(frozen=True)
class _Call:
    log: Any
    gate: Gate
    running: RunningCalls
    method: str
    request_id: str

    def wrap(self, behaviour: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        """Wrap a coroutine: one that returns its reply, or a streaming one that writes to the context."""

        async def call(request: Any, context: Any) -> Any:
            started = time.perf_counter()
            with self.running.watched(self.method, context) as watched:
                try:
                    set_principal(self.gate.admit(self.method, context))
                    reply = await behaviour(request, context)
                except BaseException as error:
                    await self._fail(watched.problem or error, context, started)
                    raise
            self._note("OK", started)
            return reply

        return call

    def refusal(self, error: ServiceError) -> Any:
        """Return a handler that refuses before it reads a byte; on the wire all four kinds are streams."""

        async def refuse(_requests: Any, context: Any) -> None:
            await self._fail(error, context, time.perf_counter())

        return grpc.stream_stream_rpc_method_handler(refuse)

    async def _fail(self, error: BaseException, context: Any, started: float) -> None:
        """Abort the call with a status that says why. A cancelled call or a stopping server just ends."""
        if isinstance(error, asyncio.CancelledError | grpc.aio.AbortError):
            self._note("CANCELLED", started)
            return
        known = error if isinstance(error, ServiceError) else self._internal(error)
        code = STATUS_CODES[known.reason]
        principal = known.details.get("principal") or log_name(current_principal())
        self._note(code.name, started, reason=known.reason, principal=principal)
        details = ((DETAILS_KEY, status_details(known, self.request_id)),)
        await context.abort(code, status_message(known), trailing_metadata=details)

    def _internal(self, error: BaseException) -> ServiceError:
        self.log.error("defect", method=self.method, request_id=self.request_id, exc_info=error)
        return ServiceError(
            ErrorReason.INTERNAL,
            "the server failed on this call; its log has the details under request id " + self.request_id,
        )

    def _note(self, code: str, started: float, **facts: Any) -> None:
        """Write the line after the status has gone out: the caller does not wait for our log."""
        milliseconds = round((time.perf_counter() - started) * 1000, 2)
        facts.setdefault("principal", log_name(current_principal()))
        line = partial(
            self.log.info,
            "call",
            method=self.method,
            request_id=self.request_id,
            code=code,
            ms=milliseconds,
            **facts,
        )
        asyncio.get_running_loop().call_soon(line)


def _request_id(details: grpc.HandlerCallDetails) -> str:
    """Return the caller's id for this call, or a new one; what is empty or no plain text is replaced."""
    for key, value in details.invocation_metadata or ():
        if key == _REQUEST_ID_KEY and isinstance(value, str) and value and value.isprintable():
            return value[:_MAX_REQUEST_ID_CHARACTERS]
    return uuid.uuid4().hex
