"""The line of each call, as a server writes it."""

import json
from collections.abc import MutableMapping
from contextlib import suppress
from time import monotonic
from typing import Any

import grpc
import numpy as np
import pytest
from structlog.testing import capture_logs

import trocar
from tests.support.models.gated_models import WAIT_S, Gate, Gated
from tests.support.models.odd_models import Identity
from tests.support.servers.running_server import RunningServer
from tests.support.servers.serving import Serve, custom
from tests.support.wire.wire import chunk, extract_call, raw_channel, request, send, tensor

MODELS = {"identity": custom(Identity), "gated": custom(Gated)}
ROWS = np.zeros((2, 3), np.float32)
Line = MutableMapping[str, Any]


def call_absent(channel: Any, method: str) -> None:
    channel.unary_unary(method)(b"", timeout=WAIT_S)


async def _turn() -> None:
    """Let the loop write the lines that wait."""


def calls(running: RunningServer, lines: list[Line]) -> list[Line]:
    running.run(_turn)
    return [line for line in lines if line["event"] == "call"]


def test_a_line_says_who_what_how_it_ended_and_how_much(serve: Serve) -> None:
    message = request(inputs=[tensor((2, 3))], chunks=[chunk(ROWS.tobytes())])
    with capture_logs() as lines, raw_channel((running := serve(models=MODELS)).address) as channel:
        metadata = (("x-request-id", "mine-1"), ("authorization", "Bearer hunter2-secret"))
        reply = list(extract_call(channel, [message.SerializeToString()], metadata=metadata))
        (line,) = calls(running, lines)
    assert line["method"] == "/trocar_api.v1.ExtractionService/Extract"
    assert (line["request_id"], line["code"], line["model"]) == ("mine-1", "OK", "identity")
    assert (line["bytes_in"], line["bytes_out"]) == (message.ByteSize(), sum(map(len, reply)))
    assert line["rows"] == 2
    assert line["ms"] >= line["compute_ms"] > 0
    assert line["queue_ms"] >= 0
    assert "hunter2" not in json.dumps(lines, default=str)
    assert len(line["principal"]) == 12
    assert "reason" not in line


def test_a_failed_call_has_its_reason(serve: Serve) -> None:
    with capture_logs() as lines, raw_channel((running := serve(models=MODELS)).address) as channel:
        with suppress(trocar.TrocarError):
            send(channel, request("absent"))
        (line,) = calls(running, lines)
    assert (line["code"], line["reason"], line["model"]) == ("NOT_FOUND", "UNKNOWN_MODEL", "absent")
    assert "rows" not in line


def test_a_cancelled_call_has_a_line(serve: Serve, gate: Gate) -> None:
    with capture_logs() as lines, raw_channel((running := serve(models=MODELS)).address) as channel:
        gate.hold()  # not before: a model that is loaded runs to see whether it keeps state
        call = extract_call(channel, [request("gated", "last").SerializeToString()])
        assert gate.entered.wait(WAIT_S)
        call.cancel()
        end = monotonic() + WAIT_S
        while not (found := calls(running, lines)):  # nobody tells a caller who has gone
            assert monotonic() < end
    (line,) = found
    assert (line["code"], line["model"]) == ("CANCELLED", "gated")


@pytest.mark.parametrize("model_id", ["two\nlines", "\x1b[31mred", "x" * 5000, "\u2028", 'a" code="OK'])
def test_nothing_that_a_caller_sends_makes_another_line(serve: Serve, model_id: str) -> None:
    with capture_logs() as lines, raw_channel((running := serve(models=MODELS)).address) as channel:
        with suppress(trocar.TrocarError):
            send(channel, request(model_id))
        (line,) = calls(running, lines)
    assert line["model"].isprintable()
    assert len(line["model"]) <= 80


@pytest.mark.parametrize("service", ["absent.Service", "trocar_api.v1.ModelService"])
def test_a_method_that_is_not_there_has_a_line(serve: Serve, service: str) -> None:
    with capture_logs() as lines, raw_channel((running := serve(models=MODELS)).address) as channel:
        with pytest.raises(grpc.RpcError):
            call_absent(channel, f"/{service}/" + "x" * 500)
        (line,) = calls(running, lines)
    assert line["code"] == "UNIMPLEMENTED"
    assert line["method"].startswith(f"/{service}/xxx")
    assert len(line["method"]) == 120


def test_the_trace_of_the_caller_is_named(serve: Serve) -> None:
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    with capture_logs() as lines, raw_channel((running := serve(models=MODELS)).address) as channel:
        for sent in (
            f"00-{trace_id}-b7ad6b7169203331-01",
            "00-nonsense",
            f"00-{'0' * 32}-b7ad6b7169203331-01",
        ):
            list(extract_call(channel, [request().SerializeToString()], metadata=(("traceparent", sent),)))
        found = [line.get("trace_id") for line in calls(running, lines)]
    assert found == [trace_id, None, None]


def test_the_request_id_of_an_error_is_the_one_in_the_log(serve: Serve) -> None:
    with capture_logs() as lines:
        running = serve(models=MODELS)
        with (
            trocar.connect(running.address) as client,
            pytest.raises(trocar.errors.UnknownModelError) as raised,
        ):
            client.extract("absent", ROWS, taps=["identity"])
        (line,) = calls(running, lines)
    assert raised.value.request_id == line["request_id"]
