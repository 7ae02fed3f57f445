"""Around every call: a request id, domain errors as statuses, one log line, nothing unexplained."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.rpc.status import DETAILS_KEY, STATUS_CODES, status_details, status_message

_REQUEST_ID_KEY = "x-request-id"
_MAX_REQUEST_ID_CHARACTERS = 64
_log = structlog.get_logger("trocar")


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every handler of ours; those of health and reflection pass unchanged."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Return the handler with its behaviour wrapped."""
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or not method.startswith("/trocar_api."):
            return handler
        request_id = _request_id(handler_call_details)
        if handler.stream_stream is not None:
            return handler._replace(stream_stream=_wrap(handler.stream_stream, method, request_id))
        return handler._replace(
            unary_unary=_wrap(_parsing(handler), method, request_id), request_deserializer=None
        )


def _parsing(handler: Any) -> Callable[..., Awaitable[Any]]:
    """Parse within the call: gRPC itself answers bytes that are no message with UNKNOWN."""

    async def call(message: bytes, context: Any) -> Any:
        try:
            parse = handler.request_deserializer
            request = message if parse is None else parse(message)
        except DecodeError:
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT, "the message is not the request of this method"
            ) from None
        return await handler.unary_unary(request, context)

    return call


def _wrap(behaviour: Callable[..., Awaitable[Any]], method: str, request_id: str) -> Callable[..., Any]:
    """Wrap a coroutine: one that returns its reply, or a streaming one that writes to the context."""

    async def call(request: Any, context: Any) -> Any:
        started = time.perf_counter()
        try:
            reply = await behaviour(request, context)
        except BaseException as error:
            await _fail(error, context, method, request_id, started)
            raise
        _log_call(method, request_id, "OK", started)
        return reply

    return call


async def _fail(error: BaseException, context: Any, method: str, request_id: str, started: float) -> None:
    """Abort the call with a status that says why. A cancelled call or a stopping server just ends."""
    if isinstance(error, asyncio.CancelledError | grpc.aio.AbortError):
        _log_call(method, request_id, "CANCELLED", started)
        return
    known = error if isinstance(error, ServiceError) else _internal(error, method, request_id)
    code = STATUS_CODES[known.reason]
    _log_call(method, request_id, code.name, started, reason=known.reason)
    details = ((DETAILS_KEY, status_details(known, request_id)),)
    await context.abort(code, status_message(known), trailing_metadata=details)


def _internal(error: BaseException, method: str, request_id: str) -> ServiceError:
    _log.error("defect", method=method, request_id=request_id, exc_info=error)
    return ServiceError(
        ErrorReason.INTERNAL,
        f"the server failed on this call; its log has the details under request id {request_id}",
    )


def _log_call(method: str, request_id: str, code: str, started: float, **facts: Any) -> None:
    """Write the line after the status has gone out: the caller does not wait for our log."""
    milliseconds = round((time.perf_counter() - started) * 1000, 2)
    line = partial(
        _log.info, "call", method=method, request_id=request_id, code=code, ms=milliseconds, **facts
    )
    asyncio.get_running_loop().call_soon(line)


def _request_id(details: grpc.HandlerCallDetails) -> str:
    """Return the caller's id for this call, or a new one; what is empty or no plain text is replaced."""
    for key, value in details.invocation_metadata or ():
        if key == _REQUEST_ID_KEY and isinstance(value, str) and value and value.isprintable():
            return value[:_MAX_REQUEST_ID_CHARACTERS]
    return uuid.uuid4().hex
