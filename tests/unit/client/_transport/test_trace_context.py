"""The trace that a client takes along: W3C trace context, read back with OpenTelemetry's own code."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from trocar._transport.channel import ConnectOptions, trace_headers


@pytest.fixture
def tracer() -> Iterator[trace.Tracer]:
    provider = TracerProvider(shutdown_on_exit=False)
    yield provider.get_tracer("test")
    provider.shutdown()


def read(headers: tuple[tuple[str, str], ...]) -> trace.SpanContext:
    context = TraceContextTextMapPropagator().extract(dict(headers), context=Context())
    return trace.get_current_span(context).get_span_context()


def test_the_active_span_is_what_the_server_reads(tracer: trace.Tracer) -> None:
    with tracer.start_as_current_span("work") as span:
        found = read(trace_headers())
    assert (found.trace_id, found.span_id) == (
        span.get_span_context().trace_id,
        span.get_span_context().span_id,
    )
    assert found.trace_flags.sampled


def test_state_goes_along() -> None:
    parent = trace.SpanContext(1, 2, True, trace.TraceFlags(1), trace.TraceState([("vendor", "1")]))
    with trace.use_span(trace.NonRecordingSpan(parent)):
        found = read(trace_headers())
    assert found.trace_state.to_header() == "vendor=1"
    assert (found.trace_id, found.span_id) == (1, 2)


def test_a_trace_that_is_not_sampled_says_so() -> None:
    off = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False).get_tracer("test")
    with off.start_as_current_span("work"):
        assert not read(trace_headers()).trace_flags.sampled


def test_without_a_span_nothing_goes_along() -> None:
    assert trace_headers() == ()


def test_it_is_in_the_metadata_of_a_call(tracer: trace.Tracer) -> None:
    options = ConnectOptions("localhost:50051", 60.0, "secret", None, 4)
    always = ["x-request-id", "x-trocar-version"]
    with tracer.start_as_current_span("work"):
        assert [key for key, _ in options.metadata("id")] == [*always, "traceparent", "authorization"]
    assert [key for key, _ in options.metadata("id")] == [*always, "authorization"]


def test_the_client_imports_no_opentelemetry() -> None:
    code = (
        "import sys, trocar\n"
        "from trocar._transport.channel import trace_headers\n"
        "assert trace_headers() == ()\n"
        "print([name for name in sys.modules if name.startswith(('opentelemetry', 'prometheus'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
