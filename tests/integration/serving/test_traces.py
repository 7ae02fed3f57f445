"""Traces from the client through the server to a collector; spans are read with OpenTelemetry's own code."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import Tracer
from structlog.testing import capture_logs

import trocar
from tests.support.models.odd_models import Identity
from tests.support.oracles.tiny_training import MODELS as TRAINABLE
from tests.support.oracles.tiny_training import make_trainer, samples
from tests.support.servers.running_server import running_server
from tests.support.servers.serving import custom
from tests.support.servers.trace_collector import Collector, collector
from trocar_server.telemetry import tracing

MODELS = {"identity": custom(Identity), **TRAINABLE}
ROWS = np.zeros((3, 3), np.float32)
NAME = "trocar_api.v1.ExtractionService/Extract"


@pytest.fixture
def collected() -> Iterator[Collector]:
    with collector() as taking:
        yield taking


@pytest.fixture
def tracer() -> Tracer:
    return TracerProvider(shutdown_on_exit=False).get_tracer("test")


@contextmanager
def traced(endpoint: str | None) -> Iterator[trocar.Client]:
    """Serve the models; when the context ends every span has been sent."""
    with (
        running_server(models=MODELS, device="cpu", otel_endpoint=endpoint) as running,
        trocar.connect(running.address) as client,
    ):
        yield client


def attributes(span: Any) -> dict[str, Any]:
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in span.attributes}


def test_the_phases_of_a_call_are_spans_below_the_callers(collected: Collector, tracer: Tracer) -> None:
    with traced(collected.endpoint) as client, tracer.start_as_current_span("a user's work") as parent:
        client.extract("identity", ROWS, taps=["identity"])
    (call,) = [span for span in collected.spans() if span.name == NAME]
    own = parent.get_span_context()
    assert call.trace_id.hex() == f"{own.trace_id:032x}"
    assert call.parent_span_id.hex() == f"{own.span_id:016x}"
    phases = [span for span in collected.spans() if span.parent_span_id == call.span_id]
    assert {span.name for span in phases} == {"receive", "check", "prepare", "queue", "pass", "reply"}
    for span in phases:
        assert span.trace_id == call.trace_id
        assert span.start_time_unix_nano <= span.end_time_unix_nano
    found = attributes(call)
    assert found["rpc.system"] == "grpc"
    assert (found["rpc.service"], found["rpc.method"]) == tuple(NAME.split("/"))
    assert found["rpc.grpc.status_code"] == 0
    assert found["trocar.model"] == "identity"
    assert found["trocar.rows"] == 3
    assert found["trocar.bytes_in"] > ROWS.nbytes
    assert collected.resource()["service.name"] == "trocar"
    assert collected.resource()["service.version"] == trocar.__version__


async def test_the_asyncio_client_takes_the_trace_along_too(collected: Collector, tracer: Tracer) -> None:
    with running_server(models=MODELS, device="cpu", otel_endpoint=collected.endpoint) as running:
        async with trocar.aio.connect(running.address) as client:
            with tracer.start_as_current_span("a user's work") as parent:
                await client.extract("identity", ROWS, taps=["identity"])
                async with client.extract_stream("identity", [ROWS, ROWS], ["identity"]) as stream:
                    assert [result.index async for result in stream] == [0, 1]
    trace_id = f"{parent.get_span_context().trace_id:032x}"
    spans = collected.spans()
    assert {span.trace_id.hex() for span in spans} == {trace_id}
    (stream_call,) = [span for span in spans if span.name.endswith("/ExtractStream")]
    phases = [span.name for span in spans if span.parent_span_id == stream_call.span_id]
    assert (phases.count("pass"), phases.count("queue"), phases.count("reply")) == (2, 2, 2)


def test_a_stream_of_the_blocking_client_takes_the_trace_along(collected: Collector, tracer: Tracer) -> None:
    with (
        traced(collected.endpoint) as client,
        tracer.start_as_current_span("a user's work") as parent,
        client.extract_stream("identity", [ROWS, ROWS], ["identity"]) as stream,
    ):
        assert [result.index for result in stream] == [0, 1]
    (call,) = [span for span in collected.spans() if span.name.endswith("/ExtractStream")]
    assert call.parent_span_id.hex() == f"{parent.get_span_context().span_id:016x}"


def test_a_call_without_a_trace_begins_one_that_the_log_names(collected: Collector) -> None:
    with capture_logs() as lines, traced(collected.endpoint) as client:
        client.extract("identity", ROWS, taps=["identity"])
    (call,) = [span for span in collected.spans() if span.name == NAME]
    (line,) = [line for line in lines if line["event"] == "call"]
    assert call.parent_span_id == b""
    assert line["trace_id"] == call.trace_id.hex()
    assert attributes(call)["trocar.request_id"] == line["request_id"]


def test_a_failed_call_says_why_and_a_callers_mistake_is_no_error_of_ours(collected: Collector) -> None:
    with traced(collected.endpoint) as client, pytest.raises(trocar.errors.UnknownModelError):
        client.extract("absent", ROWS, taps=["identity"])
    (call,) = [span for span in collected.spans() if span.name == NAME]
    assert attributes(call)["rpc.grpc.status_code"] == 5
    assert attributes(call)["trocar.reason"] == "UNKNOWN_MODEL"
    assert call.status.code == 0


def test_training_steps_are_traced(collected: Collector) -> None:
    with traced(collected.endpoint) as client:
        trainer = make_trainer(client)
        trainer.step(*samples(4))
    (call,) = [span for span in collected.spans() if span.name == "trocar_api.v1.TrainerService/Train"]
    phases = [span.name for span in collected.spans() if span.parent_span_id == call.span_id]
    assert phases == ["receive", "pass"]
    assert attributes(call)["trocar.model"] == trainer.trainer_id


def test_a_trace_that_is_not_sampled_leaves_no_spans(collected: Collector) -> None:
    unsampled = TracerProvider(sampler=ALWAYS_OFF, shutdown_on_exit=False).get_tracer("test")
    with traced(collected.endpoint) as client, unsampled.start_as_current_span("a user's work"):
        client.extract("identity", ROWS, taps=["identity"])
    assert collected.spans() == []


def test_a_collector_that_is_not_there_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "FLUSH_TIMEOUT_S", 0.1)
    with traced("http://127.0.0.1:9") as client:
        maps = client.extract("identity", ROWS, taps=["identity"])
    assert np.array_equal(maps["identity"], ROWS)


@pytest.mark.parametrize("has_setting", [True, False])
@pytest.mark.parametrize("is_disabled", [True, False])
def test_the_server_says_whether_traces_are_sent(
    collected: Collector, monkeypatch: pytest.MonkeyPatch, has_setting: bool, is_disabled: bool
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", str(is_disabled).lower())
    if not has_setting:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collected.endpoint)
    with traced(collected.endpoint if has_setting else None) as client:
        (found,) = [feature for feature in client.server_info().features if feature.name == "traces"]
    assert found.is_on is bool(collected.spans()) is not is_disabled
    assert ("OTEL_SDK_DISABLED" in found.reason) is is_disabled


def test_traces_that_only_the_environment_wants_are_off_without_an_exporter(
    collected: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collected.endpoint)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with traced(None) as client:
        (found,) = [feature for feature in client.server_info().features if feature.name == "traces"]
    assert collected.spans() == []
    assert not found.is_on
    assert "pip install 'trocar[otel]'" in found.reason
