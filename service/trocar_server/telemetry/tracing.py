"""OpenTelemetry traces: a span for each call, with a child span for each phase.

Spans are made when a call has ended, from the times that its record kept: nothing of OpenTelemetry runs
while a call does, and the exporter sends from a thread of its own.
"""

import os
import re
from collections.abc import Mapping
from threading import Thread
from typing import TYPE_CHECKING, Any

from trocar_api.reasons import ErrorReason
from trocar_server import __version__
from trocar_server.errors import ServiceError
from trocar_server.telemetry.call_observer import CallRecord, PassFacts

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
FLUSH_TIMEOUT_S = 3.0
"""How long a stopping server waits for an unresponsive collector."""
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.*)?"
)
_GRPC_CODES = (
    *("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS"),
    *("PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE"),
    *("UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED"),
)
"""By their numbers."""
_SERVER_FAULTS = frozenset(
    ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
)
"""Codes that make a server's span an error, by OpenTelemetry's conventions for gRPC."""


def trace_id_of(traceparent: str) -> str:
    """Return the trace id in a W3C `traceparent`; empty if it is missing or it is not well formed."""
    match = _TRACEPARENT.fullmatch(traceparent)
    return match[1] if match else ""


def wanted_endpoint(setting: str | None, environment: Mapping[str, str] = os.environ) -> str | None:
    """Endpoint of traces; None if they are off.

    Args:
        setting: `otel_endpoint`: None defers to the environment, an empty text turns traces off.
        environment: OpenTelemetry's own variables; an empty result leaves the choice to the exporter.
    """
    return None if why_off(setting, environment) else setting or ""


def why_off(setting: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """Why no traces are sent; empty where they are. See `wanted_endpoint`."""
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return "switched off: OTEL_SDK_DISABLED = true"
    if setting == "":
        return "switched off: otel_endpoint is empty"
    is_set = setting or any(environment.get(name) for name in _ENDPOINTS)
    return "" if is_set else "otel_endpoint is not set"


class CallTracer:
    """Makes spans of calls.

    Args:
        provider: Makes and exports spans; stopped with this.
    """

    wants_phases = True

    def __init__(self, provider: "TracerProvider") -> None:
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("trocar_server", __version__)
        self._kind = SpanKind.SERVER
        self._propagator = TraceContextTextMapPropagator()

    def started(self, call: CallRecord) -> None:
        """Wait for the end."""

    def passed(self, call: CallRecord, facts: PassFacts) -> None:
        """Wait for the end; the phases are in the record."""

    def finished(self, call: CallRecord) -> None:
        """Create the spans of a call, as children of the caller's span, and record the trace id."""
        from opentelemetry.trace import StatusCode, set_span_in_context

        span = self._tracer.start_span(
            call.method.removeprefix("/"),
            context=self._context(call),
            kind=self._kind,
            attributes=_attributes(call),
            start_time=call.started_ns,
        )
        if call.code in _SERVER_FAULTS:
            span.set_status(StatusCode.ERROR, call.reason or call.code)
        if span.is_recording():
            inside = set_span_in_context(span)
            for phase in call.phases or ():
                child = self._tracer.start_span(phase.name, context=inside, start_time=phase.start_ns)
                child.end(phase.end_ns)
        span.end(call.started_ns + int(call.elapsed_s * 1e9))
        call.trace_id = format(span.get_span_context().trace_id, "032x")

    def stop(self) -> None:
        """Flush pending spans, for a few seconds at most."""
        # Left to itself OpenTelemetry (1.45) goes on trying for 6 s and more where no collector answers.
        ending = Thread(target=self._provider.shutdown, name="otel-shutdown", daemon=True)
        ending.start()
        ending.join(FLUSH_TIMEOUT_S)

    def _context(self, call: CallRecord) -> "Context":
        from opentelemetry.context import Context

        headers = {"traceparent": call.traceparent, "tracestate": call.tracestate}
        return self._propagator.extract(headers, context=Context())


def _attributes(call: CallRecord) -> dict[str, Any]:
    _, service, method = call.method.split("/")
    attributes: dict[str, Any] = {
        "rpc.system": "grpc",
        "rpc.service": service,
        "rpc.method": method,
        "rpc.grpc.status_code": _GRPC_CODES.index(call.code),
        "trocar.request_id": call.request_id,
        "trocar.principal": call.principal,
        "trocar.bytes_in": call.bytes_in,
        "trocar.bytes_out": call.bytes_out,
    }
    if call.model_id:
        attributes["trocar.model"] = call.model_id
    if call.reason:
        attributes["trocar.reason"] = call.reason
    if call.pass_count:
        attributes |= {"trocar.passes": call.pass_count, "trocar.rows": call.row_count}
    return attributes


def open_tracer(endpoint: str, processor: "SpanProcessor | None" = None) -> CallTracer:
    """Return a tracer that sends spans to a collector over OTLP.

    Args:
        endpoint: `http://host:4317`, `https://...`; empty where `OTEL_...` variables say it.
        processor: Takes spans in place of the exporter.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, OpenTelemetry is not installed, or that is no endpoint.
    """
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT,
            f"otel_endpoint '{endpoint[:80]}' must say whether to encrypt; write http://host:4317 or "
            "https://host:4317",
        )
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT,
            f"traces need OpenTelemetry ({error.name} is missing): pip install 'trocar[otel]', or remove "
            "otel_endpoint from the configuration",
        ) from None
    named = "OTEL_SERVICE_NAME" in os.environ or "service.name" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    resource = Resource.create(
        {"service.version": __version__, **({} if named else {"service.name": "trocar"})}
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    if processor is None:
        processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint or None))
    provider.add_span_processor(processor)
    return CallTracer(provider)
