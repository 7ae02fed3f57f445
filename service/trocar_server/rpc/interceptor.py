"""Around every call: who may make it, a request id, domain errors as statuses, one log line, its watchers."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models import current_principal, set_flow, set_principal
from trocar_server.rpc.call_line import call_line
from trocar_server.rpc.counted import KINDS, behaviour_of, counted
from trocar_server.rpc.doors import OWN, Doors, refused_unknown
from trocar_server.rpc.gates import Gate, OpenGate
from trocar_server.rpc.method_scopes import is_open
from trocar_server.rpc.principal import flow_of, log_name
from trocar_server.rpc.running_calls import RunningCalls
from trocar_server.rpc.status import DETAILS_KEY, STATUS_CODES, status_details, status_message
from trocar_server.telemetry import NOBODY, UNKNOWN_METHOD, CallObserver, CallRecord, trace_id_of

_REQUEST_ID_KEY = "x-request-id"
_MAX_REQUEST_ID_CHARACTERS = 64
_CLOCKS_APART_S = 0.05


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Asks the gate about every call but those of health, and wraps every handler.

    Args:
        log: Takes one line for each call but those of health; structlog's logger `trocar` when None.
        gate: Says who may make which call; everybody every one when None.
        observer: Is told of every call, those of health and of unknown methods included.
        doors: Say which calls are let in whoever makes them.
        running: Keeps the calls that are under way.
    """

    def __init__(
        self,
        log: Any = None,
        gate: Gate | None = None,
        observer: CallObserver = NOBODY,
        doors: Doors | None = None,
        running: RunningCalls | None = None,
    ) -> None:
        self._log = log or structlog.get_logger("trocar")
        self._gate = gate or OpenGate()
        self._observer = observer
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
        headers = _headers(handler_call_details)
        metadata = handler_call_details.invocation_metadata or ()
        if handler is None and method.startswith(OWN):
            record = self._record(UNKNOWN_METHOD, "UNARY", headers, called=method)
            call = _Call(self._log, self._gate, self._running, record)
            return call.refusal(refused_unknown(self._gate, method, metadata))
        if handler is None:
            _note_unknown(self._log, self._record(UNKNOWN_METHOD, "UNARY", headers, called=method))
            return None
        if is_open(method) and self._observer is NOBODY:
            return handler
        kind = KINDS[handler.request_streaming, handler.response_streaming]
        call = _Call(self._log, self._gate, self._running, self._record(method, kind, headers))
        if not is_open(method):
            try:
                self._gate.check_early(method, metadata)
                self._doors.check(method, metadata)
            except ServiceError as error:
                return call.refusal(error)
        return call.wrapped(handler)

    def _record(self, method: str, kind: str, headers: dict[str, str], called: str = "") -> CallRecord:
        return CallRecord(
            method,
            kind,
            _request_id(headers),
            self._observer,
            headers.get("traceparent", ""),
            headers.get("tracestate", ""),
            trace_id=trace_id_of(headers["traceparent"]) if "traceparent" in headers else "",
            called=called,
        )


@dataclass(frozen=True)
class _Call:
    """One call, from the moment in which its headers have come."""

    log: Any
    gate: Gate
    running: RunningCalls
    record: CallRecord

    def wrapped(self, handler: Any) -> Any:
        """Return the handler of this call: on bytes, with everything that can fail within the call."""
        behaviour = counted(handler)
        is_guarded = not is_open(self.record.method)

        async def call(request: Any, context: Any) -> Any:
            record = self.record
            record.begin()
            with self.running.watched(record.method, context) as watched:
                try:
                    if is_guarded:
                        principal = self.gate.admit(record.method, context)
                        set_principal(principal)
                        set_flow(flow_of(principal, context.peer()))
                        record.principal = log_name(principal)
                    reply = await behaviour(record, request, context)
                except BaseException as error:
                    await self._fail(watched.problem or error, context)
                    raise
            self._end(_code_set(context))
            return reply

        name, _ = behaviour_of(handler)
        return handler._replace(**{name: call}, request_deserializer=None, response_serializer=None)

    def refusal(self, error: ServiceError) -> Any:
        """Return a handler that refuses before it reads a byte; on the wire all four kinds are streams."""

        async def refuse(_requests: Any, context: Any) -> None:
            self.record.begin()
            await self._fail(error, context)

        return grpc.stream_stream_rpc_method_handler(refuse)

    async def _fail(self, error: BaseException, context: Any) -> None:
        """Abort the call with a status that says why. A cancelled call or a stopping server just ends."""
        if isinstance(error, asyncio.CancelledError):
            self._end("DEADLINE_EXCEEDED" if _is_late(context) else "CANCELLED")
            return
        if isinstance(error, grpc.aio.AbortError):
            self._end(_code_set(context))
            return
        known = error if isinstance(error, ServiceError) else self._internal(error)
        known.__traceback__ = None  # its frames hold the request, until garbage is collected
        code = STATUS_CODES[known.reason]
        self.record.principal = known.details.get("principal") or log_name(current_principal())
        self._end(code.name, known.reason)
        details = ((DETAILS_KEY, status_details(known, self.record.request_id)),)
        await context.abort(code, status_message(known), trailing_metadata=details)

    def _internal(self, error: BaseException) -> ServiceError:
        request_id = self.record.request_id
        self.log.error("defect", method=self.record.method, request_id=request_id, exc_info=error)
        return ServiceError(
            ErrorReason.INTERNAL,
            "the server failed on this call; its log has the details under request id " + request_id,
        )

    def _end(self, code: str, reason: str = "") -> None:
        """Tell who watches before the status goes out, and write the line after: nobody waits for our log."""
        self.record.end(code, reason)
        if not is_open(self.record.method):
            _write(self.log, self.record)


def _note_unknown(log: Any, record: CallRecord) -> None:
    """Count and log a call of a method that is not there; gRPC answers it."""
    record.begin()
    record.end("UNIMPLEMENTED")
    _write(log, record)


def _write(log: Any, record: CallRecord) -> None:
    asyncio.get_running_loop().call_soon(partial(log.info, "call", **call_line(record)))


def _is_late(context: Any) -> bool:
    """Whether it was the deadline that ended a call. The client's clock may be a little before ours."""
    remaining_s = context.time_remaining()  # None without a deadline
    return remaining_s is not None and remaining_s < _CLOCKS_APART_S


def _code_set(context: Any) -> str:
    """Return the code that a handler has set or aborted with itself."""
    code = context.code()
    return code.name if isinstance(code, grpc.StatusCode) else "OK"


def _headers(details: grpc.HandlerCallDetails) -> dict[str, str]:
    """Return what came with a call as text; of several with one name the last."""
    return {key: value for key, value in details.invocation_metadata or () if isinstance(value, str)}


def _request_id(headers: dict[str, str]) -> str:
    """Return the caller's id for this call, or a new one; what is empty or no plain text is replaced."""
    given = headers.get(_REQUEST_ID_KEY, "")
    return given[:_MAX_REQUEST_ID_CHARACTERS] if given.isprintable() and given else uuid.uuid4().hex
