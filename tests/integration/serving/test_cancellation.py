"""Deadlines and cancels stop the work; the replica is usable at once."""

import asyncio
import itertools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest

import trocar
from tests.support.models.gated_models import WAIT_S, Gate, Gated
from tests.support.oracles.oracle import Array
from tests.support.servers.footprint import hook_counts
from tests.support.servers.running_server import RunningServer
from tests.support.servers.serving import Serve, custom
from tests.support.wire.wire import chunk, extract_call, raw_channel, request, tensor
from trocar_server.app import app
from trocar_server.config import ModelConfig, ServerConfig

ROW = np.ones((1, 3), np.float32)
_sizes = itertools.count(2)


def fresh_rows() -> Array:
    """Return an input of a form that no pass has had before: nobody knows how long it will take."""
    return np.ones((next(_sizes), 3), np.float32)


class RawCall:
    """One Extract call that a test can cancel."""

    def __init__(self, channel: grpc.Channel, model_id: str, rows: Array | None = None) -> None:
        rows = fresh_rows() if rows is None else rows
        message = request(model_id, "last", inputs=[tensor(rows.shape)], chunks=[chunk(rows.tobytes())])
        self._stream = extract_call(channel, [message.SerializeToString()])

    def cancel(self) -> None:
        self._stream.cancel()


@pytest.fixture
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with raw_channel(server.address) as opened:
        yield opened


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


def held_call(
    client: trocar.Client, background: ThreadPoolExecutor, gate: Gate, model_id: str
) -> "Future[Any]":
    """Start a call and wait until its pass is held up inside the model."""
    gate.hold()
    call = background.submit(
        client.extract, model_id, fresh_rows(), "last", options=trocar.options(timeout_s=WAIT_S)
    )
    assert gate.entered.wait(WAIT_S)
    return call


def test_a_cancelled_call_stops_inside_the_model(channel: grpc.Channel, gate: Gate) -> None:
    gate.hold()
    call = RawCall(channel, "gated")
    assert gate.entered.wait(WAIT_S)
    call.cancel()
    assert gate.left.wait(WAIT_S)
    assert gate.was_aborted


def test_a_call_whose_client_is_gone_stops_inside_the_model(server: RunningServer, gate: Gate) -> None:
    gate.hold()
    with raw_channel(server.address) as doomed:
        abandoned = RawCall(doomed, "gated")  # a call that nobody holds is cancelled at once
        assert gate.entered.wait(WAIT_S)
    del abandoned
    assert gate.left.wait(WAIT_S)
    assert gate.was_aborted


async def test_a_cancelled_task_stops_inside_the_model(server: RunningServer, gate: Gate) -> None:
    gate.hold()
    async with trocar.aio.connect(server.address) as client:
        task = asyncio.create_task(client.extract("gated", fresh_rows(), taps="last"))
        assert await asyncio.to_thread(gate.entered.wait, WAIT_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(gate.left.wait, WAIT_S)
    assert gate.was_aborted


def test_a_deadline_stops_the_pass_inside_the_model(client: trocar.Client, gate: Gate) -> None:
    gate.hold()
    with pytest.raises(trocar.errors.DeadlineExceededError):
        client.extract("gated", fresh_rows(), taps="last", options=trocar.options(timeout_s=0.5))
    assert gate.left.wait(WAIT_S)
    assert gate.was_aborted


def test_the_replica_is_usable_after_a_cancel(
    client: trocar.Client, server: RunningServer, channel: grpc.Channel, gate: Gate
) -> None:
    expected = client.extract("gated", ROW, taps="last")["last"]
    hooks = hook_counts(server)
    gate.hold()
    call = RawCall(channel, "gated")
    assert gate.entered.wait(WAIT_S)
    call.cancel()
    assert gate.left.wait(WAIT_S)
    gate.release()
    assert np.array_equal(client.extract("gated", ROW, taps="last")["last"], expected)
    assert hook_counts(server) == hooks


def test_two_hundred_cancels_leave_the_replica_usable(
    client: trocar.Client, server: RunningServer, channel: grpc.Channel, gate: Gate
) -> None:
    expected = client.extract("gated", ROW, taps="last")["last"]
    hooks = hook_counts(server)
    for _ in range(200):
        gate.reset()
        gate.hold()
        call = RawCall(channel, "gated")
        assert gate.entered.wait(WAIT_S)
        call.cancel()
        assert gate.left.wait(WAIT_S)
    gate.release()
    assert np.array_equal(client.extract("gated", ROW, taps="last")["last"], expected)
    assert hook_counts(server) == hooks


def test_a_cancel_while_the_form_of_new_inputs_is_recorded_stops_that_too(
    client: trocar.Client, gate: Gate
) -> None:
    """A model that needs data runs once on made-up values of a new form; a guard must watch that, too."""
    gate.hold()
    with pytest.raises(trocar.errors.DeadlineExceededError):
        client.extract("gated-on-data", fresh_rows(), taps="last", options=trocar.options(timeout_s=0.5))
    stopped = gate.left.wait(10)
    gate.release()
    client.extract("gated-on-data", ROW, taps="last")
    assert stopped


def test_a_pass_that_was_short_before_and_is_long_now_can_be_cancelled(
    client: trocar.Client, channel: grpc.Channel, gate: Gate
) -> None:
    """How long a model that looks at its data takes depends on the data, not on their form."""
    rows = fresh_rows()
    client.extract("gated-on-data", rows, taps="last")
    gate.hold()
    call = RawCall(channel, "gated-on-data", rows)
    assert gate.entered.wait(WAIT_S)
    call.cancel()
    stopped = gate.left.wait(10)
    gate.release()
    client.extract("gated-on-data", ROW, taps="last")
    assert stopped


def test_a_call_whose_deadline_passes_in_the_queue_is_not_run(
    client: trocar.Client, background: ThreadPoolExecutor, gate: Gate
) -> None:
    running = held_call(client, background, gate, "stuck")
    with pytest.raises((trocar.errors.ServerBusyError, trocar.errors.DeadlineExceededError)):
        client.extract("stuck", ROW, taps="last", options=trocar.options(timeout_s=0.5))
    gate.release()
    running.result(WAIT_S)
    client.extract("stuck", ROW, taps="last")
    assert gate.pass_count == 2


def test_a_cancel_in_the_queue_is_not_run(
    client: trocar.Client,
    server: RunningServer,
    channel: grpc.Channel,
    background: ThreadPoolExecutor,
    gate: Gate,
) -> None:
    client.extract("stuck", ROW, taps="last")
    running = held_call(client, background, gate, "stuck")
    waiting = RawCall(channel, "stuck", ROW)
    _wait_for_queue(server, "stuck", 1)
    waiting.cancel()
    _wait_for_queue(server, "stuck", 0)
    gate.release()
    running.result(WAIT_S)
    client.extract("stuck", ROW, taps="last")
    assert gate.pass_count == 3


def _wait_for_queue(server: RunningServer, model_id: str, length: int) -> None:
    """Wait until so many calls wait for a replica; each look runs on the server's own loop."""
    pool = server.engine.deployment(model_id).pool

    async def look() -> bool:
        await asyncio.sleep(0)
        return pool.waiting_count == length

    assert any(server.run(look) for _ in range(100_000))


def test_a_call_of_another_model_behind_a_held_one_is_dropped_unrun(
    client: trocar.Client, server: RunningServer, background: ThreadPoolExecutor, gate: Gate
) -> None:
    """Its replica is free and its pass waits for the one thread that owns torch."""
    rows = fresh_rows()
    client.extract("gated", rows, taps="last")
    running = held_call(client, background, gate, "stuck")
    before = gate.pass_count
    with pytest.raises(trocar.errors.DeadlineExceededError):
        client.extract("gated", rows, taps="last", options=trocar.options(timeout_s=0.5))
    gate.release()
    running.result(WAIT_S)
    server.on_owner(lambda: None)
    assert gate.pass_count == before


def test_a_new_form_whose_deadline_passes_in_the_queue_is_not_recorded(
    client: trocar.Client, server: RunningServer, background: ThreadPoolExecutor, gate: Gate
) -> None:
    """Recordings wait for the owner thread like passes; nobody wants those of calls that have ended."""
    deployment = server.engine.deployment("gated")
    running = held_call(client, background, gate, "stuck")
    batches = [fresh_rows() for _ in range(5)]
    calls = [
        background.submit(client.extract, "gated", rows, "last", options=trocar.options(timeout_s=0.5))
        for rows in batches
    ]
    # Sizes that are predicted wait for a replica, and may be refused there at once.
    refused = {trocar.errors.DeadlineExceededError, trocar.errors.ServerBusyError}
    assert {type(call.exception(WAIT_S)) for call in calls} <= refused
    gate.release()
    running.result(WAIT_S)
    server.on_owner(lambda: None)
    kept = deployment.recordings.items()
    recorded = {signature[0].shapes[0] for signature, found in kept if not found.is_predicted}
    assert not recorded & {rows.shape for rows in batches}


def test_a_server_answers_while_a_pass_runs(
    client: trocar.Client, background: ThreadPoolExecutor, gate: Gate
) -> None:
    running = held_call(client, background, gate, "gated")
    assert client.server_info().device == "cpu"
    assert client.model("gated").is_loaded
    assert client.modules("gated")["last"].call_count == 1
    with pytest.raises(trocar.errors.UnknownModuleError):
        client.extract("gated", ROW, taps="nowhere")
    gate.release()
    running.result(WAIT_S)


def test_a_full_queue_is_refused_while_the_pass_goes_on(
    serve: Serve, background: ThreadPoolExecutor, gate: Gate
) -> None:
    running_server = serve(models={"gated": custom(Gated)}, limits={"max_queue": 2})
    with trocar.connect(running_server.address) as client:
        client.extract("gated", ROW, taps="last")
        running = held_call(client, background, gate, "gated")
        waiting = [background.submit(client.extract, "gated", ROW, "last") for _ in range(2)]
        _wait_for_queue(running_server, "gated", 2)
        with pytest.raises(trocar.errors.ServerBusyError, match="2 calls already wait"):
            client.extract("gated", ROW, taps="last")
        gate.release()
        assert [len(call.result(WAIT_S)) for call in [running, *waiting]] == [1, 1, 1]


async def test_a_stopping_server_lets_a_running_call_finish(
    background: ThreadPoolExecutor, gate: Gate
) -> None:
    config = ServerConfig(
        port=0, device="cpu", grace_s=WAIT_S, models={"gated": ModelConfig(**custom(Gated))}
    )
    running = await app.start(config)
    with trocar.connect(f"127.0.0.1:{running.rpc.port}") as client:
        gate.hold()
        call = asyncio.wrap_future(background.submit(client.extract, "gated", ROW, "last"))
        assert await asyncio.to_thread(gate.entered.wait, WAIT_S)
        stopping = asyncio.ensure_future(running.stop())
        gate.release()
        assert list(await call) == ["last"]
        await stopping
