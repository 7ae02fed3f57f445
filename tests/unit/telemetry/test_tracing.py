"""Spans of calls, as OpenTelemetry's own exporter in memory sees them."""

import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.telemetry import CallRecord, Observers, trace_id_of
from trocar_server.telemetry.tracing import CallTracer, open_tracer, wanted_endpoint

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Iterator[CallTracer]:
    tracer = open_tracer("", SimpleSpanProcessor(exporter))
    yield tracer
    tracer.stop()


def spans(exporter: InMemorySpanExporter) -> list[Any]:
    return list(exporter.get_finished_spans())


def call(tracer: CallTracer, traceparent: str = "", tracestate: str = "") -> CallRecord:
    watchers = Observers((tracer,))
    made = CallRecord("/a.Service/Method", "UNARY", "id-1", watchers, traceparent, tracestate)
    made.begin()
    return made


def test_a_call_is_a_span_with_its_phases_below(tracer: CallTracer, exporter: InMemorySpanExporter) -> None:
    made = call(tracer)
    made.add_phase("check", made.started_ns, made.started_ns + 1000)
    made.add_phase("pass", made.started_ns + 1000, made.started_ns + 5000)
    made.end()
    *phases, whole = spans(exporter)
    assert [span.name for span in phases] == ["check", "pass"]
    assert [span.end_time - span.start_time for span in phases] == [1000, 4000]
    assert all(span.parent.span_id == whole.context.span_id for span in phases)
    assert (whole.name, whole.kind, whole.start_time) == (
        "a.Service/Method",
        SpanKind.SERVER,
        made.started_ns,
    )
    assert whole.end_time - whole.start_time == int(made.elapsed_s * 1e9)
    assert made.trace_id == f"{whole.context.trace_id:032x}"


def test_the_callers_span_is_the_parent_and_its_state_is_kept(
    tracer: CallTracer, exporter: InMemorySpanExporter
) -> None:
    made = call(tracer, traceparent=f"00-{TRACE}-{SPAN}-01", tracestate="vendor=1")
    made.end()
    (whole,) = spans(exporter)
    assert f"{whole.parent.trace_id:032x}" == made.trace_id == TRACE
    assert f"{whole.parent.span_id:016x}" == SPAN
    assert whole.context.trace_state.to_header() == "vendor=1"


@pytest.mark.parametrize(
    "given", ["", "nonsense", f"00-{'0' * 32}-{SPAN}-01", f"ff-{TRACE}-{SPAN}-01", "00" * 5000]
)
def test_a_trace_context_that_is_none_begins_a_new_trace(
    tracer: CallTracer, exporter: InMemorySpanExporter, given: str
) -> None:
    made = call(tracer, traceparent=given, tracestate="=,=,\n" * 100)
    made.end()
    (whole,) = spans(exporter)
    assert whole.parent is None
    assert made.trace_id != TRACE
    assert trace_id_of(given) == ""


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("OK", StatusCode.UNSET),
        ("NOT_FOUND", StatusCode.UNSET),
        ("CANCELLED", StatusCode.UNSET),
        ("INTERNAL", StatusCode.ERROR),
        ("DEADLINE_EXCEEDED", StatusCode.ERROR),
    ],
)
def test_only_what_is_the_servers_fault_is_an_error(
    tracer: CallTracer, exporter: InMemorySpanExporter, code: str, status: StatusCode
) -> None:
    call(tracer).end(code)
    (whole,) = spans(exporter)
    assert whole.status.status_code is status


def test_the_numbers_of_codes_are_those_of_grpc(tracer: CallTracer, exporter: InMemorySpanExporter) -> None:
    for code in grpc.StatusCode:
        exporter.clear()
        call(tracer).end(code.name)
        (whole,) = spans(exporter)
        assert whole.attributes["rpc.grpc.status_code"] == code.value[0]


@pytest.mark.parametrize(
    ("setting", "environment", "expected"),
    [
        (None, {}, None),
        ("", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, None),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, ""),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4317"}, ""),
        ("http://d:4317", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317"}, "http://d:4317"),
        ("http://d:4317", {"OTEL_SDK_DISABLED": "true"}, None),
    ],
)
def test_the_setting_comes_before_the_environment(
    setting: str | None, environment: dict[str, str], expected: str | None
) -> None:
    assert wanted_endpoint(setting, environment) == expected


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://c:4317", "c"])
def test_an_endpoint_says_whether_to_encrypt(endpoint: str) -> None:
    with pytest.raises(ServiceError, match="http://host:4317") as refused:
        open_tracer(endpoint)
    assert refused.value.reason is ErrorReason.INVALID_ARGUMENT


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ServiceError, match=r"pip install 'trocar\[otel\]'") as refused:
        open_tracer("http://localhost:4317")
    assert refused.value.reason is ErrorReason.INVALID_ARGUMENT


def test_the_operators_name_of_the_service_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "vision")
    exporter = InMemorySpanExporter()
    tracer = open_tracer("", SimpleSpanProcessor(exporter))
    call(tracer).end()
    tracer.stop()
    (whole,) = spans(exporter)
    assert whole.resource.attributes["service.name"] == "vision"
