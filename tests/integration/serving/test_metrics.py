"""Calls of each kind against a real server, and what its metrics say of them afterwards."""

import threading
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import trocar
from tests.support.models.gated_models import WAIT_S, Gate, Gated
from tests.support.models.odd_models import Identity
from tests.support.models.tiny_models import Plain
from tests.support.models.trainable_nets import SHAPE, TinyNet
from tests.support.oracles.tiny_training import make_trainer, samples
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.scraping import Scrape, scrape, scrape_until
from tests.support.servers.serving import Serve, custom, rebuilt
from tests.support.servers.waiting import no_thread_left
from tests.support.wire.wire import chunk, extract_call, raw_channel, request, send, tensor
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

EXTRACT = {"grpc_service": "trocar_api.v1.ExtractionService", "grpc_method": "Extract"}
MODELS = {
    "plain": custom(Plain, (3, 8, 8)),
    "identity": custom(Identity),
    "gated": custom(Gated),
    "tiny": custom(TinyNet, SHAPE),
}
IMAGES = np.zeros((2, 3, 8, 8), np.float32)


@pytest.fixture
def watched(serve: Serve) -> RunningServer:
    return serve(models=MODELS, metrics_port=0, reflection=True)


def call_absent(channel: Any, method: str) -> None:
    channel.unary_unary(method)(b"", timeout=WAIT_S)


def handled(found: Scrape, code: str) -> float:
    return found.value("grpc_server_handled_total", grpc_code=code, **EXTRACT)


def test_calls_are_counted_one_by_one_by_status_and_model(watched: RunningServer) -> None:
    with trocar.connect(watched.address) as client:
        for _ in range(7):
            client.extract("plain", IMAGES, taps=["fc"])
        for _ in range(3):
            with pytest.raises(trocar.errors.UnknownModuleError):
                client.extract("plain", IMAGES, taps=["no-such-module"])
        for _ in range(2):
            with pytest.raises(trocar.errors.UnknownModelError):
                client.extract("no-such-model", IMAGES, taps=["fc"])
        with pytest.raises(trocar.errors.InputRejectedError):
            client.extract("plain", IMAGES[:, :1], taps=["fc"])
    found = scrape(watched)
    assert found.value("grpc_server_started_total", **EXTRACT) == 13
    assert [handled(found, code) for code in ("OK", "NOT_FOUND", "INVALID_ARGUMENT")] == [7, 5, 1]
    assert found.value("grpc_server_handled_total") == 13
    assert found.value("grpc_server_handling_seconds_count", **EXTRACT) == 13
    assert found.value("grpc_server_handling_seconds_bucket", le="+Inf", **EXTRACT) == 13
    assert found.value("trocar_requests_total", model="plain", grpc_code="OK") == 7
    assert found.value("trocar_requests_total", model="plain") == 11
    assert found.value("trocar_requests_total") == 11
    assert found.value("trocar_errors_total", reason="UNKNOWN_MODULE") == 3
    assert found.value("trocar_errors_total", reason="UNKNOWN_MODEL") == 2
    assert found.value("trocar_calls_in_flight") == 0


def test_passes_are_counted_with_their_samples_and_seconds(watched: RunningServer) -> None:
    compute_s = 0.0
    with trocar.connect(watched.address) as client:
        for batch in (1, 2, 5):
            maps = client.extract("plain", np.zeros((batch, 3, 8, 8), np.float32), taps=["fc"])
            compute_s += maps.timing.compute_s
        client.extract("identity", np.zeros((4, 3), np.float32), taps=["identity"])
    found = scrape(watched)
    assert found.value("trocar_passes_total", model="plain", engine="eager", numerics="exact") == 3
    assert found.value("trocar_passes_total") == 4
    assert found.value("trocar_rows_total", model="plain") == 8
    assert found.value("trocar_rows_total", model="identity") == 4
    assert found.value("trocar_queue_seconds_count", model="plain") == 3
    assert found.value("trocar_compute_seconds_count", model="plain") == 3
    assert found.value("trocar_compute_seconds_sum", model="plain") == pytest.approx(compute_s, rel=1e-6)
    assert found.value("trocar_cache_hits_total", model="plain") == 0


def test_bytes_are_those_of_the_messages(watched: RunningServer) -> None:
    rows = np.zeros((700, 3_000), np.float32)
    data = rows.tobytes()
    half = len(data) // 2
    first = request("identity", inputs=[tensor(rows.shape)], chunks=[chunk(data[:half])])
    second = request(taps=[], inputs=[], chunks=[chunk(data[half:], offset=half)], model_id="")
    with raw_channel(watched.address, max_send_message_length=-1) as channel:
        reply = send(channel, first, second)
    found = scrape(watched)
    assert len(reply) > 2
    assert found.value("trocar_request_bytes_total", model="identity") == first.ByteSize() + second.ByteSize()
    assert found.value("trocar_reply_bytes_total", model="identity") == sum(map(len, reply))
    assert found.value("grpc_server_msg_received_total", **EXTRACT) == 2
    assert found.value("grpc_server_msg_sent_total", **EXTRACT) == len(reply)


def test_a_stream_is_one_call_and_a_pass_for_each_batch(watched: RunningServer) -> None:
    batches = [np.zeros((3, 3, 8, 8), np.float32)] * 5
    with trocar.connect(watched.address) as client, client.extract_stream("plain", batches, ["fc"]) as stream:
        assert len(list(stream)) == 5
    labels = {"grpc_method": "ExtractStream", "grpc_type": "BIDI_STREAMING"}
    found = scrape_until(watched, lambda now: now.value("grpc_server_handled_total", **labels) == 1)
    assert found.value("grpc_server_handled_total", grpc_code="OK", **labels) == 1
    assert found.value("trocar_passes_total", model="plain") == 5
    assert found.value("trocar_rows_total", model="plain") == 15
    assert found.value("trocar_requests_total", model="plain", grpc_code="OK") == 1


def test_a_call_is_in_flight_with_its_replica_until_it_is_cancelled(
    watched: RunningServer, gate: Gate
) -> None:
    gate.hold()
    message = request("gated", "last", inputs=[tensor((1, 3))]).SerializeToString()
    with raw_channel(watched.address) as channel:
        call = extract_call(channel, [message])
        assert gate.entered.wait(WAIT_S)
        during = scrape(watched)
        call.cancel()
        scrape_until(watched, lambda now: handled(now, "CANCELLED") == 1)
        after = scrape(watched)  # the metrics of one answer are not all of one moment
    assert during.value("trocar_calls_in_flight", **EXTRACT) == 1
    assert during.value("trocar_replicas_leased", model="gated") == 1
    assert during.value("grpc_server_started_total", **EXTRACT) == 1
    assert handled(during, "CANCELLED") == 0
    assert after.value("trocar_calls_in_flight") == 0
    assert after.value("trocar_replicas_leased", model="gated") == 0
    assert after.value("trocar_requests_total", model="gated", grpc_code="CANCELLED") == 1
    assert after.value("trocar_passes_total", model="gated") == 0


def test_recorded_passes_are_counted_by_model(watched: RunningServer) -> None:
    before = scrape(watched).value("trocar_recorded_passes_total", model="plain")
    with trocar.connect(watched.address) as client:
        client.plan("plain", (3, 3, 21, 13), "fc")
        client.plan("plain", (3, 3, 21, 13), "fc")
    assert scrape(watched).value("trocar_recorded_passes_total", model="plain") == before + 1


def test_what_waits_for_a_replica_is_shown(watched: RunningServer, gate: Gate) -> None:
    gate.hold()
    message = request("gated", "last", inputs=[tensor((1, 3))]).SerializeToString()
    with raw_channel(watched.address) as channel:
        calls = [extract_call(channel, [message]) for _ in range(3)]
        assert gate.entered.wait(WAIT_S)
        scrape_until(watched, lambda now: now.value("trocar_queue_length", model="gated") == 2)
        gate.release()
        for call in calls:
            list(call)
    assert scrape(watched).value("trocar_queue_length", model="gated") == 0


def test_a_thousand_unknown_methods_and_models_add_a_handful_of_series(watched: RunningServer) -> None:
    with raw_channel(watched.address) as channel:
        send(channel, request())
        with suppress(trocar.TrocarError):
            send(channel, request("absent"))
        with suppress(grpc.RpcError):
            call_absent(channel, "/absent.Service/Method")
        before = scrape(watched)
        for index in range(1000):
            with suppress(trocar.TrocarError):
                send(channel, request(f"absent-{index}"))
            with suppress(grpc.RpcError):
                call_absent(channel, f"/absent.Service{index}/Method{index}")
    after = scrape(watched)
    unknown = {"grpc_service": "unknown", "grpc_method": "unknown", "grpc_code": "UNIMPLEMENTED"}
    assert after.value("grpc_server_handled_total", **unknown) == 1001
    assert handled(after, "NOT_FOUND") == 1001
    assert after.series_count == before.series_count
    assert after.label_values("model") == set(MODELS)
    assert not {value for value in after.label_values("grpc_method") if value.startswith("Method")}


def test_all_trainers_are_one_model(watched: RunningServer) -> None:
    before = scrape(watched)
    images, labels = samples(8)
    with trocar.connect(watched.address) as client:
        trainers = [make_trainer(client), make_trainer(client)]
        for trainer in trainers:
            trainer.step(images, labels)
            trainer.step(images, labels)
            client.extract(trainer.trainer_id, images, taps=["fc"])
        found = scrape(watched)
    assert "trainer" in found.label_values("model")
    assert not {trainer.trainer_id for trainer in trainers} & found.label_values("model")
    assert found.value("trocar_trainers", state="ready") == 2
    assert found.value("trocar_replicas", model="trainer") == 2
    assert found.value("trocar_rows_total", model="trainer") == 16
    about_one = ("Train", "GetTrainer", "ExportTrainer", "Extract")
    handled_calls = sum(found.value("grpc_server_handled_total", grpc_method=name) for name in about_one)
    assert found.value("trocar_requests_total", model="trainer") == handled_calls
    steps = "trocar_training_steps_total"  # of the process: other tests train, too
    assert found.value(steps) - before.value(steps) == 4
    rows = "trocar_training_rows_total"
    assert found.value(rows) - before.value(rows) == 32


def test_a_spool_is_counted_while_it_lives_and_after(watched: RunningServer) -> None:
    written = {"direction": "written"}
    before = scrape(watched)
    images, labels = samples(64)
    with trocar.connect(watched.address) as client:
        spooled = trocar.training.save_on_disk(budget_bytes=0, min_bytes=0)
        trainer = make_trainer(client, saved_tensors=spooled)
        result = trainer.step(images, labels)
        during = scrape(watched)
        trainer.close()
    after = scrape(watched)
    name = "trocar_spool_bytes_total"
    assert result.written_bytes > 0
    assert during.value(name, **written) - before.value(name, **written) >= result.written_bytes
    assert after.value(name, **written) >= during.value(name, **written)
    assert after.value(name, direction="read") > before.value(name, direction="read")


@pytest.mark.parametrize("selector", ["conv", "relu@0", "relu@1", "pool", "fc"])
def test_the_depth_of_a_stop_is_that_of_hooks_in_process(watched: RunningServer, selector: str) -> None:
    model = rebuilt(Plain)
    path, _, index = selector.partition("@")
    begun: list[str] = []
    ended: list[int] = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: begun.append(name))
        if name == path:
            module.register_forward_hook(lambda *_: ended.append(len(begun)))
    with torch.no_grad():
        model(torch.zeros(1, 3, 8, 8))
    with trocar.connect(watched.address) as client:
        client.extract("plain", IMAGES, taps=[selector])
    expected = ended[int(index or 0)] / len(begun)
    assert scrape(watched).value("trocar_stop_depth_sum", model="plain") == pytest.approx(expected)


def test_health_and_reflection_are_calls_too(watched: RunningServer) -> None:
    with raw_channel(watched.address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        health.Check(health_pb2.HealthCheckRequest())
        with pytest.raises(grpc.RpcError) as unknown:
            health.Check(health_pb2.HealthCheckRequest(service="absent"))
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
        listed = list(reflection.ServerReflectionInfo(iter(asked)))
    found = scrape(watched)
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    assert len(listed[0].list_services_response.service) > 5
    check = {"grpc_service": "grpc.health.v1.Health", "grpc_method": "Check", "grpc_type": "UNARY"}
    assert found.value("grpc_server_handled_total", grpc_code="OK", **check) == 1
    assert found.value("grpc_server_handled_total", grpc_code="NOT_FOUND", **check) == 1
    reflected = {"grpc_method": "ServerReflectionInfo", "grpc_code": "OK"}
    assert found.value("grpc_server_handled_total", **reflected) == 1


def test_health_watches_are_in_flight_while_they_last(watched: RunningServer) -> None:
    watch = {"grpc_method": "Watch"}
    with raw_channel(watched.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        call = stub.Watch(health_pb2.HealthCheckRequest())
        assert next(call).status == health_pb2.HealthCheckResponse.SERVING
        during = scrape(watched)
        call.cancel()
        scrape_until(watched, lambda now: now.value("trocar_calls_in_flight", **watch) == 0)
    assert during.value("trocar_calls_in_flight", **watch) == 1
    assert during.value("grpc_server_msg_sent_total", **watch) == 0  # counted when the call ends


def test_the_server_itself_is_shown(watched: RunningServer) -> None:
    found = scrape(watched)
    assert found.value("trocar_models", state="loaded") == len(MODELS)
    assert found.value("trocar_replicas") == len(MODELS)
    assert found.value("trocar_build_info", version=trocar.__version__, device="cpu") == 1
    assert found.value("process_resident_memory_bytes") > 10 << 20
    assert 0 < found.value("trocar_disk_bytes", kind="free") <= found.value("trocar_disk_bytes", kind="total")


def test_there_are_no_metrics_unless_they_are_asked_for(server: RunningServer) -> None:
    assert server.app.telemetry.metrics_port is None
    assert "metrics" not in {thread.name for thread in threading.enumerate()}


def test_a_local_server_shows_none_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TROCAR_METRICS_PORT", "0")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    before = {thread.name for thread in threading.enumerate()}
    with trocar.connect("local", models=[], settings={"device": "cpu", "data_dir": tmp_path}) as client:
        client.models()
        started = {thread.name for thread in threading.enumerate()} - before
    assert not {name for name in started if "metrics" in name or "Otel" in name or "otel" in name}


def test_the_port_is_closed_when_the_server_stops() -> None:
    with running_server(models={}, device="cpu", metrics_port=0) as running:
        port = running.app.telemetry.metrics_port
        scrape(running)
    assert "metrics" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S)


def test_a_taken_port_is_refused_and_nothing_is_left_running(watched: RunningServer, serve: Serve) -> None:
    port = watched.app.telemetry.metrics_port
    with no_thread_left(), pytest.raises(ServiceError, match=f"metrics on 127.0.0.1:{port}") as refused:
        serve(models={}, metrics_port=port)
    assert refused.value.reason is ErrorReason.INVALID_ARGUMENT


def test_two_servers_of_one_process_count_apart(watched: RunningServer, serve: Serve) -> None:
    other = serve(models={"identity": MODELS["identity"]}, metrics_port=0)
    with trocar.connect(watched.address) as client:
        client.extract("identity", np.zeros((1, 3), np.float32), taps=["identity"])
    assert scrape(watched).value("trocar_passes_total") == 1
    assert scrape(other).value("trocar_passes_total") == 0


def test_only_what_has_a_meaning_is_shown(watched: RunningServer) -> None:
    with trocar.connect(watched.address) as client:
        client.models()
    assert not [name for name in scrape(watched).names() if name.endswith("_created")]
