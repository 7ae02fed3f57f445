"""Keys and values wait for nobody: neither for readers who do not read nor for callers who are gone."""

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import trocar
from tests.support.models.causal_models import TinyGpt2
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.waiting import wait_until
from tests.support.wire.wire import chunk, raw_channel, request, tensor
from trocar_api.v1 import generation_pb2 as pb
from trocar_api.v1 import tap_pb2, tensor_pb2
from trocar_server.rpc.transfer import backlog

GENERATE = "/trocar_api.v1.GenerationService/Generate"
STALLED = 64
PROMPT = np.arange(100, dtype=np.int64)[None]
LONG: dict[str, Any] = {"max_new_tokens": 50, "stop_token_ids": []}
PLACES = ("ln_1", "attn.c_attn", "mlp.c_fc", "mlp.act", "mlp.c_proj")
WIDE = [f"transformer.h.{block}.{place}" for block in range(2) for place in PLACES]
FACTORY = f"{TinyGpt2.__module__}:{TinyGpt2.__name__}"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    models = {"gpt2": {"factory": FACTORY, "input_shape": (4,), "weights": "random:0"}}
    with running_server(models=models, device="cpu", limits={"max_queue": 4 * STALLED}) as running:
        yield running


def begun(channel: grpc.Channel) -> Any:
    """Begin a run whose values fill the window of its stream at once, and read its first message alone."""
    taps = [tap_pb2.Tap(selector=selector) for selector in WIDE]
    ids = tensor(PROMPT.shape, tensor_pb2.DTYPE_INT64, "input_ids")
    extraction = request("gpt2", taps=taps, inputs=[ids], chunks=[])
    options = pb.GenerationOptions(max_new_tokens=50, has_stop_token_ids=True)
    first = pb.GenerateRequest(extraction=extraction, options=options)
    messages = [first, pb.GenerateRequest(chunks=[chunk(PROMPT.tobytes())])]
    method: Any = channel.stream_stream(GENERATE, None, None)
    call = method(iter([message.SerializeToString() for message in messages]), timeout=170)
    assert pb.GenerateResponse.FromString(next(call)).HasField("started")
    return call


def test_stalled_readers_keep_no_caches_and_stop_nobody(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "MOST_BYTES", 1)
    caches = server.engine.caches
    with raw_channel(server.address, **{"http2.bdp_probe": 0}) as channel:
        calls = [begun(channel) for _ in range(STALLED)]
        with trocar.connect(server.address) as client:  # meanwhile
            assert len(client.generate("gpt2", PROMPT, max_new_tokens=20, stop_token_ids=[]).token_ids) == 20
        wait_until(lambda: caches.count == 0)
        assert caches.byte_count == 0
        for call in calls:
            with pytest.raises(grpc.RpcError) as raised:
                list(call)
            assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "keys and values are free for others" in (raised.value.details() or "")
    wait_until(lambda: server.engine.admission.reserved() == (0, 0.0, 0))


def test_a_reader_who_is_behind_its_buffer_gets_all(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "MOST_BYTES", 1)
    with trocar.connect(server.address) as client:
        run = client.generate("gpt2", PROMPT, taps=["transformer.h.0"], **LONG)
        assert len(run.token_ids) == 50
        assert run["transformer.h.0"].shape == (149, 16)


@pytest.mark.parametrize("way", ["cancel", "close"])
def test_a_caller_who_is_gone_keeps_no_cache(server: RunningServer, way: str) -> None:
    caches = server.engine.caches
    client = trocar.connect(server.address)
    runs = [client.generate("gpt2", PROMPT, n=1000, **LONG) for _ in range(4)]
    wait_until(lambda: caches.count == len(runs))
    assert caches.byte_count > 0
    if way == "cancel":
        for run in runs:
            run.close()
    client.close()
    wait_until(lambda: caches.count == 0)
    assert caches.byte_count == 0
    wait_until(lambda: server.engine.admission.reserved() == (0, 0.0, 0))
