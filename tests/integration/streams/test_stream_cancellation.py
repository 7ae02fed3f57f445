"""Streams that end early, at every stage: nothing is left of them, and the replica is free at once."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

import trocar
from tests.support.models.gated_models import GATE, WAIT_S, Gate, Gated, StuckInOneModule
from tests.support.models.tiny_models import Plain
from tests.support.oracles.oracle import Array, noise
from tests.support.servers.footprint import hook_counts
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import Serve, custom
from tests.support.wire.wire import chunk, raw_channel, tensor
from trocar_api.v1 import stream_pb2 as pb
from trocar_api.v1 import tap_pb2
from trocar_api.v1.statistics_pb2 import STATISTIC_MEAN as MEAN

METHOD = "/trocar_api.v1.StreamService/ExtractStream"
ROW = np.ones((1, 3), np.float32)


def _start(model_id: str, selector: str) -> bytes:
    start = pb.ExtractStreamStart(model_id=model_id, taps=[tap_pb2.Tap(selector=selector)])
    return pb.ExtractStreamRequest(start=start).SerializeToString()


def _batch(index: int, values: Array, share: float = 1.0) -> bytes:
    data = values.tobytes()
    batch = pb.StreamBatch(batch_index=index, inputs=[tensor(values.shape)])
    chunks = [chunk(data[: int(len(data) * share)])]
    return pb.ExtractStreamRequest(batch=batch, chunks=chunks).SerializeToString()


class RawStream:
    """A stream that is sent message by message, stays open, and reads nothing unless told to."""

    def __init__(self, channel: grpc.Channel, *messages: bytes) -> None:
        self._open = threading.Event()
        method: Any = channel.stream_stream(METHOD, None, None)
        self.call = method(self._messages(messages), timeout=WAIT_S)

    def _messages(self, messages: tuple[bytes, ...]) -> Iterator[bytes]:
        yield from messages
        self._open.wait(WAIT_S)

    def results(self, count: int) -> None:
        for _ in range(count):
            next(self.call)

    def cancel(self) -> None:
        self.call.cancel()
        self._open.set()


@pytest.fixture(scope="module")
def busy() -> Iterator[RunningServer]:
    models = {
        "gated": custom(Gated),
        "stuck": custom(StuckInOneModule),
        "plain": custom(Plain, (3, 8, 8)),
        "resnet18": {"weights": "random:0"},
    }
    with running_server(models=models, device="cpu", limits={"max_queue": 2}) as running:
        yield running


@pytest.fixture(scope="module")
def near(busy: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(busy.address, timeout_s=WAIT_S) as connected:
        connected.extract("gated", ROW, "last")
        yield connected


@pytest.fixture
def channel(busy: RunningServer) -> Iterator[grpc.Channel]:
    with raw_channel(busy.address) as opened:
        yield opened


def _tasks_of_streams(server: RunningServer) -> int:
    """Count the server's tasks that belong to a stream: its handler and the stages that work ahead."""

    async def count() -> int:
        await asyncio.sleep(0)
        return sum(
            1 for task in asyncio.all_tasks() if "_fill" in repr(task) or "stream" in repr(task).lower()
        )

    return server.run(count)


def _eventually(server: RunningServer, holds: Callable[[], bool]) -> bool:
    """Look again and again; each look is a round trip through the server's loop."""
    return any(holds() or server.run(lambda: asyncio.sleep(0.001)) for _ in range(20_000))


@pytest.fixture
def nothing_left(busy: RunningServer, near: trocar.Client, gate: Gate) -> Iterator[None]:
    hooks, tasks = hook_counts(busy), _tasks_of_streams(busy)
    yield
    gate.release()
    assert _eventually(busy, lambda: _tasks_of_streams(busy) <= tasks)
    for model_id in ("gated", "stuck", "plain", "resnet18"):
        pool = busy.engine.deployment(model_id).pool
        assert _eventually(busy, lambda: pool.leased_count == 0)  # noqa: B023 - called at once
        assert pool.waiting_count == 0
    assert hook_counts(busy) == hooks
    assert near.extract("gated", ROW, "last")["last"].shape == (1, 3)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("is_closed", [False, True])
def test_a_stream_that_ends_while_it_uploads_leaves_nothing(busy: RunningServer, is_closed: bool) -> None:
    with raw_channel(busy.address) as doomed:
        stream = RawStream(doomed, _start("plain", "fc"), _batch(0, noise(2, 3, 8, 8), share=0.5))
        assert _eventually(busy, lambda: _tasks_of_streams(busy) > 0)
        if not is_closed:
            stream.cancel()
    stream.cancel()


@pytest.mark.usefixtures("nothing_left")
def test_a_stream_that_ends_before_its_start_is_complete_leaves_nothing(channel: grpc.Channel) -> None:
    start = pb.ExtractStreamStart(
        model_id="plain",
        taps=[tap_pb2.Tap(selector="fc", statistics=[MEAN])],
        has_running_statistics=True,
        checkpoint_byte_count=1 << 29,
    )
    message = pb.ExtractStreamRequest(start=start, chunks=[chunk(bytes(100))])
    RawStream(channel, message.SerializeToString()).cancel()


@pytest.mark.usefixtures("nothing_left")
def test_a_stream_that_ends_while_images_are_decoded_leaves_nothing(
    busy: RunningServer, near: trocar.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, released = threading.Event(), threading.Event()

    async def slow(*_: object) -> Any:
        entered.set()
        await asyncio.to_thread(released.wait, WAIT_S)
        return [[]]

    monkeypatch.setattr("trocar_server.engine.run.preparation.decode_images", slow)
    stream = near.extract_stream("resnet18", [np.zeros((2, 9, 9, 3), np.uint8)] * 3, "fc")
    with ThreadPoolExecutor(1) as background:
        reading = background.submit(next, stream)
        assert entered.wait(WAIT_S)
        with raw_channel(busy.address) as other:
            RawStream(other, _start("plain", "fc")).cancel()
        assert near.extract("plain", noise(1, 3, 8, 8), "fc")["fc"].shape == (1, 5)
        released.set()
        assert reading.result(WAIT_S).error is not None  # what was decoded here is no image
    stream.close()


@pytest.mark.usefixtures("nothing_left")
def test_a_stream_that_ends_while_it_waits_for_a_replica_leaves_nothing(
    busy: RunningServer, near: trocar.Client, channel: grpc.Channel, gate: Gate
) -> None:
    gate.hold()
    with ThreadPoolExecutor(1) as background:
        running = background.submit(near.extract, "stuck", ROW, "last")
        assert gate.entered.wait(WAIT_S)
        pool = busy.engine.deployment("stuck").pool
        streams = [RawStream(channel, _start("stuck", "last"), _batch(0, ROW)) for _ in range(4)]
        assert _eventually(busy, lambda: pool.waiting_count == 2)
        for stream in streams:  # two wait in line, two for room in it
            stream.cancel()
        assert _eventually(busy, lambda: pool.waiting_count == 0)
        gate.release()
        assert running.result(WAIT_S)["last"].shape == (1, 3)


@pytest.mark.usefixtures("nothing_left")
def test_a_stream_that_ends_in_the_pass_stops_it(channel: grpc.Channel, gate: Gate) -> None:
    gate.hold()
    stream = RawStream(channel, _start("gated", "last"), *(_batch(index, ROW) for index in range(5)))
    assert gate.entered.wait(WAIT_S)
    stream.cancel()
    assert gate.left.wait(WAIT_S)
    assert gate.was_aborted


@pytest.mark.usefixtures("nothing_left")
def test_a_reader_that_does_not_read_holds_no_replica_and_little_memory(
    busy: RunningServer, near: trocar.Client, channel: grpc.Channel, gate: Gate
) -> None:
    """What he does not read is not computed, but for what fits on its way to him: 3,000 replies of 48 KiB."""
    rows = np.ones((4096, 3), np.float32)
    near.extract("gated", rows, "last")
    gate.reset()
    method: Any = channel.stream_stream(METHOD, None, None)
    count = 3000
    messages = (_batch(index - 1, rows) if index else _start("gated", "last") for index in range(count + 1))
    call = method(messages, timeout=WAIT_S)
    next(call)  # and no more
    for index in range(50):
        found = near.extract("gated", ROW + index, "last", options=trocar.options(timeout_s=WAIT_S))["last"]
        assert found.shape == (1, 3)
    passes = GATE.pass_count - 50
    assert 1 <= passes < count // 2
    call.cancel()


@pytest.mark.usefixtures("nothing_left")
def test_many_cancelled_streams_leave_nothing(channel: grpc.Channel, gate: Gate) -> None:
    image = noise(2, 3, 8, 8)
    for count in range(60):
        batches = [_batch(index, image) for index in range(8)]
        stream = RawStream(channel, _start("plain", "fc"), *batches)
        stream.results(count % 5)
        stream.cancel()


def test_thirty_streams_at_once_on_one_replica_with_a_short_queue_all_come_through(
    busy: RunningServer, near: trocar.Client
) -> None:
    def batches(number: int) -> list[Array]:
        return [noise(1 + number % 3, 3, 8, 8, seed=100 * number + index) for index in range(8)]

    def run(number: int) -> list[Array]:
        with trocar.connect(busy.address, timeout_s=WAIT_S) as own:
            return [result.unwrap()["fc"] for result in own.extract_stream("plain", batches(number), "fc")]

    with ThreadPoolExecutor(30) as threads:
        found = list(threads.map(run, range(30)))
    for number, values in enumerate(found):
        assert len(values) == 8
        for image, value in zip(batches(number), values, strict=True):
            assert np.array_equal(value, near.extract("plain", image, "fc")["fc"])


def test_a_batch_whose_time_is_up_fails_alone(serve: Serve, gate: Gate) -> None:
    server = serve(models={"gated": custom(Gated)})
    with trocar.connect(server.address) as client:
        client.extract("gated", ROW, "last")
        gate.hold()
        with client.extract_stream(
            "gated", [ROW, ROW + 1], "last", options=trocar.options(timeout_s=0.3)
        ) as stream:
            assert isinstance(next(stream).error, trocar.errors.DeadlineExceededError)
            gate.release()
            later = next(stream)
        assert later.error is None or isinstance(later.error, trocar.errors.DeadlineExceededError)
        assert client.extract("gated", ROW, "last")["last"].shape == (1, 3)
