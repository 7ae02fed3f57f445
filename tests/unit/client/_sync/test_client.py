"""Both clients against a server that speaks the contract through protobuf."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest

import trocar
from tests.unit.client.conftest import Connect
from tests.unit.client.fake_server import FakeServer, Received, chunks, echo, reply, reply_head

IMAGES = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)


def test_values_come_back_as_they_were_sent(client: trocar.Client) -> None:
    maps = client.extract("resnet18", IMAGES, taps=["layer4"])
    assert list(maps) == ["layer4"]
    assert maps["layer4"].dtype == np.float32
    np.testing.assert_array_equal(maps["layer4"], IMAGES)
    assert maps.timing == trocar.ServerTiming(queue_s=0.25, compute_s=0.5)
    assert maps.stopped_at == "layer4"
    assert maps.model_id == "resnet18"


def test_the_clients_share_of_the_time_is_what_the_server_does_not_name(client: trocar.Client) -> None:
    timing = client.extract("resnet18", IMAGES, taps=["layer4"]).timing
    assert timing.total_s is not None
    assert timing.total_s > 0
    assert timing.transfer_s is not None
    assert timing.transfer_s == max(0.0, timing.total_s - 0.25 - 0.5)
    assert str(timing) == f"queue 250.0 ms, compute 500.0 ms, transfer {timing.transfer_s * 1000:.1f} ms"


def test_a_batch_of_a_stream_has_the_servers_times_only() -> None:
    timing = trocar.ServerTiming(queue_s=0.001, compute_s=0.02)
    assert (timing.total_s, timing.transfer_s) == (None, None)
    assert str(timing) == "queue 1.0 ms, compute 20.0 ms"


def test_taps_reach_the_server_with_all_they_say(client: trocar.Client, server: FakeServer) -> None:
    wanted = trocar.tap(
        "fc/in", alias="x", stats=["mean", "inf_count"], values=False, over="channel", channel_dim=-1
    )
    client.extract(
        "resnet18", (IMAGES, IMAGES), taps=["layer4", wanted], options=trocar.options(chunk_bytes=8192)
    )
    head = server.received[0].head
    assert head.model_id == "resnet18"
    assert head.max_chunk_bytes == 8192
    plain, full = head.taps
    assert plain.selector == "layer4"
    assert not plain.HasField("values")
    assert (full.selector, full.alias, full.values) == ("fc/in", "x", False)
    assert (list(full.statistics), full.scope, full.channel_dim) == ([1, 10], 2, -1)


@pytest.mark.parametrize("megabytes", [1, 3, 20])
def test_large_inputs_and_outputs_arrive_whole(
    client: trocar.Client, server: FakeServer, megabytes: int
) -> None:
    inputs = np.random.default_rng(0).integers(0, 255, (megabytes, 1 << 20), dtype=np.uint8)
    maps = client.extract("resnet18", inputs, taps=["layer1"])
    assert np.array_equal(maps["layer1"], inputs)
    assert (server.received[0].message_count == 1) == (megabytes == 1)


def test_several_payloads_keep_their_order(client: trocar.Client) -> None:
    parts = [
        np.full((2_000_000, 1), 1, np.float32),
        np.empty((0, 7), np.float32),
        np.ones((3, 5), np.float32),
    ]
    maps = client.extract("resnet18", {"a": parts[0], "b": parts[1], "c": parts[2]}, taps=["a", "b", "c"])
    for name, part in zip("abc", parts, strict=False):
        np.testing.assert_array_equal(maps[name], part)


def test_out_arrays_are_filled_in_place(client: trocar.Client) -> None:
    mine = np.zeros_like(IMAGES)
    maps = client.extract("resnet18", IMAGES, taps=["layer4"], out={"layer4": mine})
    assert maps["layer4"] is mine
    np.testing.assert_array_equal(mine, IMAGES)


def test_every_call_has_its_own_request_id_and_the_token(connect: Connect, server: FakeServer) -> None:
    client = connect(server.target, token="secret")
    client.extract("resnet18", IMAGES, taps=["layer4"])
    client.extract("resnet18", IMAGES, taps=["layer4"])
    first, second = (received.metadata for received in server.received)
    assert first["authorization"] == "Bearer secret"
    assert len(first["x-request-id"]) == 32
    assert first["x-request-id"] != second["x-request-id"]


def test_models_come_as_plain_data(client: trocar.Client) -> None:
    assert [model.model_id for model in client.models()] == ["resnet18"]
    assert "<td>resnet18</td><td>loaded</td>" in client.models()._repr_html_()  # type: ignore[attr-defined]
    model = client.model("resnet18")
    assert model.is_loaded
    assert model.dtype == "float32"
    assert model.categories == ("tench", "goldfish")
    assert model.preprocessing is not None
    assert model.preprocessing.crop == (224, 224)


def test_load_and_unload_name_the_model(client: trocar.Client, server: FakeServer) -> None:
    assert client.load("resnet18", "random:7").state == "loaded"
    assert client.unload("resnet18").state == "unloaded"
    (_, load), (_, unload) = server.calls
    assert (load.model_id, load.weights) == ("resnet18", "random:7")
    assert unload.model_id == "resnet18"


def test_modules_sends_the_shape_to_assume(client: trocar.Client, server: FakeServer) -> None:
    tree = client.modules("resnet18", inputs_shape=(8, 3, 224, 224))
    assert tree["layer1"].output_shape == (1, 64, 56, 56)
    assert list(server.calls[0][1].inputs[0].shape) == [8, 3, 224, 224]


def test_server_info_has_the_limits(client: trocar.Client) -> None:
    info = client.server_info()
    assert (info.version, info.device, info.limits.max_batch) == ("0.1.0", "cpu", 256)


def test_wait_ready_waits_for_a_server_that_starts_later(connect: Connect) -> None:
    server = FakeServer()
    timer = threading.Timer(0.3, server.start)
    timer.start()
    try:
        assert connect(server.target).wait_ready(timeout_s=120).version == "0.1.0"
    finally:
        timer.join()
        server.stop()


def test_wait_ready_gives_up_in_time(connect: Connect) -> None:
    with pytest.raises(trocar.errors.DeadlineExceededError):
        connect("127.0.0.1:1").wait_ready(timeout_s=0.1)


def test_an_absent_server_is_named(connect: Connect) -> None:
    with pytest.raises(
        trocar.errors.ServerUnavailableError, match=r"127\.0\.0\.1:1: .*is the server running there"
    ) as caught:
        connect("127.0.0.1:1", retries=0).models()
    assert len(caught.value.request_id) == 32


def test_a_call_is_repeated_while_the_server_is_unavailable(connect: Connect, server: FakeServer) -> None:
    attempts: list[int] = []

    def third_time(received: Received, context: grpc.ServicerContext) -> Iterator[bytes]:
        attempts.append(1)
        if len(attempts) < 3:
            context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
        yield from echo(received, context)

    server.behaviour = third_time
    inputs = np.zeros((6, 1 << 20), np.uint8)  # above gRPC's own retry buffer, and above one message
    maps = connect(server.target).extract("resnet18", inputs, taps=["layer4"])
    assert maps["layer4"].shape == inputs.shape
    assert len(attempts) == 3
    ids = {received.metadata["x-request-id"] for received in server.received}
    assert len(ids) == 1


def test_a_deadline_ends_the_call(client: trocar.Client, server: FakeServer) -> None:
    released = threading.Event()

    def stall(_: Received, __: grpc.ServicerContext) -> Iterator[bytes]:
        released.wait(30)
        yield b""

    server.behaviour = stall
    with pytest.raises(trocar.errors.DeadlineExceededError, match="timeout_s"):
        client.extract("resnet18", IMAGES, taps=["layer4"], options=trocar.options(timeout_s=0.2))
    released.set()


def _cut_short(received: Received, _: grpc.ServicerContext) -> Iterator[bytes]:
    arrays = {"layer4": received.arrays()[0]}
    yield reply_head(arrays).SerializeToString()
    yield next(chunks([arrays["layer4"].tobytes()], 100))


def test_a_reply_that_ends_early_is_an_error(client: trocar.Client, server: FakeServer) -> None:
    server.behaviour = _cut_short
    with pytest.raises(trocar.BadReplyError, match="ended early: 380 of 480 bytes of 'layer4'"):
        client.extract("resnet18", IMAGES, taps=["layer4"])


def _endless(received: Received, _: grpc.ServicerContext) -> Iterator[bytes]:
    array = received.arrays()[0]
    yield from reply({"layer4": array})
    while True:
        yield from chunks([array.tobytes()], 1 << 20)


def test_a_call_whose_reply_is_refused_is_cancelled(client: trocar.Client, server: FakeServer) -> None:
    server.behaviour = _endless
    with pytest.raises(trocar.BadReplyError, match="more bytes"):
        client.extract("resnet18", IMAGES, taps=["layer4"])
    assert server.cancelled.wait(10)


async def test_cancelling_the_task_cancels_the_call(server: FakeServer) -> None:
    server.behaviour = _stall_until_cancelled
    async with trocar.aio.connect(server.target) as client:
        task = asyncio.create_task(client.extract("resnet18", IMAGES, taps=["layer4"]))
        await asyncio.to_thread(server.running.wait, 10)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(server.cancelled.wait, 10)


def _stall_until_cancelled(_: Received, context: grpc.ServicerContext) -> Iterator[bytes]:
    ended = threading.Event()
    context.add_callback(ended.set)
    ended.wait(30)
    yield b""


async def test_concurrent_calls_do_not_mix(server: FakeServer) -> None:
    async with trocar.aio.connect(server.target) as client:
        inputs = [np.full((300, 1000), index, np.float32) for index in range(16)]
        replies = await asyncio.gather(*(client.extract("m", array, taps=["x"]) for array in inputs))
    for array, maps in zip(inputs, replies, strict=True):
        assert np.array_equal(maps["x"], array)


@pytest.mark.parametrize("options", [{"timeout_s": 0}, {"timeout_s": float("inf")}, {"retries": 9}])
def test_connect_refuses_what_is_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        trocar.connect("localhost:1", **options)


def test_closing_the_context_closes_the_connection(server: FakeServer) -> None:
    with trocar.connect(server.target) as client:
        client.models()
    with pytest.raises(ValueError, match="closed"):
        client.models()


def test_the_token_is_not_shown() -> None:
    with trocar.connect("localhost:1", token="secret") as client:
        assert "secret" not in repr(client)
