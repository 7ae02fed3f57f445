"""Prepared calls: the results of `extract`, by whichever way; and what ends with them does."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

import trocar
from tests.support.models.gated_models import WAIT_S, Gate, Gated
from tests.support.models.odd_models import Identity
from tests.support.models.tiny_models import Plain, Structured
from tests.support.oracles.oracle import Array, noise
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import Serve, custom
from tests.support.servers.waiting import wait_until
from trocar._sync import prepared as prepared_module
from trocar._transport import segments
from trocar_server.auth import Scope, TokenFile, live_grants

ROW = np.array([[1.5, -2.0, 3.25]], np.float32)
IMAGES = noise(2, 3, 8, 8)
MODELS: dict[str, Any] = {
    "identity": custom(Identity),
    "gated": custom(Gated),
    "plain": custom(Plain, (3, 8, 8)),
    "structured": custom(Structured),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server on a Unix socket."""
    host = f"unix:{tmp_path_factory.mktemp('s')}/s"
    with running_server(models=MODELS, device="cpu", host=host) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(server.app.rpc.address, retries=0) as connected:
        yield connected


def lent_bytes(server: RunningServer) -> int:
    lender = server.app.rpc._sharing._lender
    assert lender is not None
    return lender.byte_count


def assert_same(found: trocar.FeatureMaps, expected: trocar.FeatureMaps) -> None:
    """Check that two results are equal bit for bit, but for times."""
    assert list(found) == list(expected)
    for name in expected:
        assert found[name].dtype == expected[name].dtype
        assert found[name].tobytes() == expected[name].tobytes()
    assert dict(found.info) == dict(expected.info)
    assert repr(found.stats) == repr(expected.stats)
    assert found.expansions == expected.expansions
    assert found.edit_expansions == expected.edit_expansions
    assert found.stopped_at == expected.stopped_at
    assert found.objective == expected.objective
    assert found.execution == expected.execution


REQUESTS: dict[str, tuple[str, Array, Any, dict[str, Any]]] = {
    "one value": ("plain", IMAGES, "fc", {}),
    "several values": ("plain", IMAGES, ["conv*", "relu@1", "/out"], {}),
    "casts": ("plain", IMAGES, [trocar.tap("conv", cast="bfloat16"), trocar.tap("fc", cast="int8")], {}),
    "statistics alone": ("plain", IMAGES, trocar.tap("conv", stats=["mean", "std"], values=False), {}),
    "statistics": ("plain", IMAGES, trocar.tap("conv", stats=["mean", "max"], over="channel"), {}),
    "reduction": ("plain", IMAGES, trocar.tap("conv", reduce=trocar.pool("avg")), {}),
    "edit": ("plain", IMAGES, "fc", {"edits": trocar.edit("conv", "scale", 2.0)}),
    "edit with an array": (
        "identity",
        ROW,
        "identity",
        {"edits": trocar.edit("identity", "add", np.array([[1.0, 2.0, 3.0]], np.float32))},
    ),
    "gradient": (
        "plain",
        IMAGES,
        [trocar.tap("conv", gradient=True), "fc"],
        {"of": trocar.logit(0)},
    ),
    "start": ("plain", noise(2, 4, 8, 8), "fc", {"start_at": "conv2/in"}),
    "structure": ("structured", ROW, ["both", "split", "/out"], {}),
    "float16 on the wire": ("plain", IMAGES, ["conv", "fc"], {"options": trocar.options(wire="float16")}),
    "another byte order": ("plain", IMAGES.astype(">f4"), "fc", {}),
    "strided": ("plain", noise(2, 3, 8, 16)[..., ::2], "fc", {}),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_results_equal_those_of_extract(client: trocar.Client, name: str) -> None:
    model_id, example, taps, options = REQUESTS[name]
    with client.prepare(model_id, example, taps, **options) as prepared:
        for batch in (example * 2, example - 1, example):
            assert_same(prepared(batch), client.extract(model_id, batch, taps, **options))
            assert prepared.is_shared


def test_several_arguments_and_sources(client: trocar.Client) -> None:
    edits = trocar.edit("identity", "swap", source="other")
    sources = {"other": ROW * 3}
    with client.prepare("identity", {"x": ROW}, "identity", edits=edits, sources=sources) as prepared:
        found = prepared({"x": ROW * 2})
        assert prepared.is_shared
        assert np.array_equal(found["identity"], ROW * 3)


def test_slots_are_not_offered_before_they_have_the_arrays_of_the_edits(
    client: trocar.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of another thread would compute with zeros."""
    edits, offered = trocar.edit("identity", "swap", source="other"), []
    copy = segments.copy_payloads

    def filled(payloads: Any, target: Any) -> None:
        offered.append(prepared.is_shared)
        copy(payloads, target)

    with client.prepare("identity", ROW, "identity", edits=edits, sources={"other": ROW * 3}) as prepared:
        monkeypatch.setattr(prepared_module, "copy_payloads", filled)
        assert np.array_equal(prepared(ROW)["identity"], ROW * 3)
        assert offered == [False] * 4 + [True]  # four slots, then the inputs of the call


def test_over_tcp_it_is_an_extract() -> None:
    with (
        running_server(models=MODELS, device="cpu") as server,
        trocar.connect(server.address) as client,
        client.prepare("plain", IMAGES, "fc") as prepared,
    ):
        assert_same(prepared(IMAGES * 2), client.extract("plain", IMAGES * 2, "fc"))
        assert not prepared.is_shared


async def test_tasks_of_one_asyncio_client_do_not_mix_up(server: RunningServer) -> None:
    async with (
        trocar.aio.connect(server.app.rpc.address) as client,
        await client.prepare("identity", ROW, "identity") as prepared,
    ):

        async def call(number: int) -> bool:
            return np.array_equal((await prepared(ROW + number))["identity"], ROW + number)

        for _ in range(3):
            assert all(await asyncio.gather(*map(call, range(9))))  # more than there are slots
        assert prepared.is_shared


def test_threads_of_one_client_do_not_mix_up(client: trocar.Client) -> None:
    with client.prepare("identity", ROW, "identity") as prepared, ThreadPoolExecutor(9) as threads:

        def call(number: int) -> bool:
            return np.array_equal(prepared(ROW + number)["identity"], ROW + number)

        assert all(threads.map(call, range(90)))
        assert prepared.is_shared


def test_results_do_not_change_with_later_calls(client: trocar.Client) -> None:
    with client.prepare("identity", ROW, ["identity", "/in"]) as prepared:
        found = [prepared(ROW + number) for number in range(6)]
    assert all(np.array_equal(maps["identity"], ROW + number) for number, maps in enumerate(found))


def test_a_callers_array_is_filled(client: trocar.Client) -> None:
    with client.prepare("identity", ROW, "identity") as prepared:
        mine = np.zeros_like(ROW)
        assert prepared(ROW, out={"identity": mine})["identity"] is mine
        assert np.array_equal(mine, ROW)
        with pytest.raises(ValueError, match="must be a writable"):
            prepared(ROW, out={"identity": np.zeros((2, 3), np.float32)})
        assert np.array_equal(prepared(ROW * 2)["identity"], ROW * 2)
        assert prepared.is_shared


def test_the_example_is_copied(client: trocar.Client) -> None:
    weights = np.array([[1.0, 2.0, 3.0]], np.float32)
    edits = trocar.edit("identity", "add", weights)
    with client.prepare("identity", ROW, "identity", edits=edits) as prepared:
        expected = ROW + weights
        weights[:] = 0
        assert np.array_equal(prepared(ROW)["identity"], expected)


@pytest.mark.parametrize("wrong", [ROW[:, :2], ROW.astype(np.float64), np.vstack([ROW, ROW]), (ROW, ROW)])
def test_inputs_unlike_the_example_are_refused(client: trocar.Client, wrong: Any) -> None:
    with client.prepare("identity", ROW, "identity") as prepared:
        with pytest.raises(ValueError, match="differ from `prepare`'s"):
            prepared(wrong)
        assert np.array_equal(prepared(ROW)["identity"], ROW)


def test_a_wrong_request_is_refused_when_it_is_prepared(client: trocar.Client, server: RunningServer) -> None:
    with pytest.raises(trocar.errors.UnknownModuleError):
        client.prepare("identity", ROW, "nowhere")
    wait_until(lambda: lent_bytes(server) == 0)


def test_a_larger_reply_goes_another_way_and_then_there_is_room(
    client: trocar.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client.prepare("identity", ROW, "identity") as prepared:
        monkeypatch.setattr(prepared, "_reply_bytes", 4)
        assert np.array_equal(prepared(ROW * 2)["identity"], ROW * 2)
        assert not prepared.is_shared
        assert np.array_equal(prepared(ROW * 3)["identity"], ROW * 3)
        assert prepared.is_shared


def test_large_replies_stay_views_of_other_memory(
    client: trocar.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared_module, "_MOST_REPLY_BYTES", 8)
    with client.prepare("identity", ROW, "identity") as prepared:
        assert np.array_equal(prepared(ROW)["identity"], ROW)
        assert not prepared.is_shared


def test_without_room_for_a_slot_calls_are_made_as_others(tmp_path: Path) -> None:
    limits = {"max_shared_memory_bytes": 4096}
    with (
        running_server(models=MODELS, device="cpu", host=f"unix:{tmp_path}/s", limits=limits) as server,
        trocar.connect(server.app.rpc.address) as client,
        client.prepare("identity", ROW, "identity") as prepared,
    ):
        assert np.array_equal(prepared(ROW)["identity"], ROW)
        assert not prepared.is_shared


def test_memory_and_descriptors_come_back(client: trocar.Client, server: RunningServer) -> None:
    """Server and client are one process here: whatever either leaves would show."""

    def call() -> None:
        with client.prepare("identity", ROW, "identity") as prepared:
            prepared(ROW)
            assert prepared.is_shared
            assert lent_bytes(server) > 0

    call()
    wait_until(lambda: lent_bytes(server) == 0)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(10):
        call()
    wait_until(lambda: lent_bytes(server) == 0 and len(list(Path("/proc/self/fd").iterdir())) <= before)


def test_a_closed_client_closes_what_it_prepared(server: RunningServer) -> None:
    with trocar.connect(server.app.rpc.address) as client:
        prepared = client.prepare("identity", ROW, "identity")
        prepared(ROW)
        assert prepared.is_shared
    assert not prepared.is_shared
    with pytest.raises(trocar.errors.ServerUnavailableError, match="was closed"):
        prepared(ROW)
    wait_until(lambda: lent_bytes(server) == 0)


def test_a_deadline_stops_the_pass_inside_the_model(client: trocar.Client, gate: Gate) -> None:
    with client.prepare("gated", ROW, "last") as prepared:
        prepared(ROW)
        gate.hold()
        with pytest.raises(trocar.errors.DeadlineExceededError):
            prepared(ROW, timeout_s=0.5)
        assert gate.left.wait(WAIT_S)
        assert gate.was_aborted
        gate.release()
        assert_same(prepared(ROW), client.extract("gated", ROW, "last"))
        assert prepared.is_shared


async def test_a_cancelled_task_stops_inside_the_model(server: RunningServer, gate: Gate) -> None:
    async with (
        trocar.aio.connect(server.app.rpc.address) as client,
        await client.prepare("gated", ROW, "last") as prepared,
    ):
        await prepared(ROW)
        for _ in range(6):  # more often than there are slots
            gate.reset()
            gate.hold()
            task = asyncio.create_task(prepared(ROW))
            assert await asyncio.to_thread(gate.entered.wait, WAIT_S)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(gate.left.wait, WAIT_S)
            assert gate.was_aborted
        gate.release()
        assert_same(await prepared(ROW), await client.extract("gated", ROW, "last"))
        assert prepared.is_shared


def test_a_call_whose_handle_is_closed_stops_and_is_made_again(client: trocar.Client, gate: Gate) -> None:
    with ThreadPoolExecutor(1) as threads, client.prepare("gated", ROW, "last") as prepared:
        prepared(ROW)
        gate.hold()
        call = threads.submit(prepared, ROW)
        assert gate.entered.wait(WAIT_S)
        prepared.close()
        assert gate.left.wait(WAIT_S)
        assert gate.was_aborted
        gate.release()
        assert_same(call.result(WAIT_S), client.extract("gated", ROW, "last"))


async def test_a_call_whose_handle_is_closed_while_its_inputs_are_copied_is_made_again(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    large, loop, copy = noise(1024, 384), asyncio.get_running_loop(), segments.copy_payloads

    def closed_meanwhile(payloads: Any, target: Any) -> None:
        copy(payloads, target)
        asyncio.run_coroutine_threadsafe(prepared.close(), loop).result(WAIT_S)

    async with (
        trocar.aio.connect(server.app.rpc.address, retries=0) as client,
        await client.prepare("identity", large, "identity") as prepared,
    ):
        await prepared(large)
        assert prepared.is_shared
        monkeypatch.setattr("trocar._async.prepared.copy_payloads", closed_meanwhile)
        found = await prepared(large * 2, timeout_s=5.0)
        assert np.array_equal(found["identity"], large * 2)
        assert not prepared.is_shared


def test_each_call_has_a_line_in_the_log_and_is_counted_as_a_call(client: trocar.Client) -> None:
    with capture_logs() as lines, client.prepare("identity", ROW, "identity") as prepared:
        for _ in range(3):
            prepared(ROW)
        wait_until(lambda: len([line for line in lines if line["event"] == "call"]) >= 4)
        found = [line for line in lines if line.get("bytes_in") == 64]
    assert [line["method"] for line in found] == ["/trocar_api.v1.ExtractionService/Extract"] * 3
    assert [(line["code"], line["model"], line["rows"]) for line in found] == [("OK", "identity", 1)] * 3
    assert len({line["request_id"] for line in found}) == 3


def test_a_failed_call_says_why_and_the_next_one_works(client: trocar.Client, server: RunningServer) -> None:
    with client.prepare("plain", IMAGES, "fc") as prepared:
        expected = prepared(IMAGES)
        server.run(lambda: server.engine.deployments.unload("plain"))
        try:
            with pytest.raises(trocar.errors.ModelNotLoadedError) as caught:
                prepared(IMAGES)
        finally:
            server.run(lambda: server.engine.deployments.load("plain"))
        assert len(caught.value.request_id) == 32
        assert_same(prepared(IMAGES), expected)  # of the model that was loaded again
        assert prepared.is_shared


def test_a_draining_server_refuses_prepared_calls_and_does_not_wait_for_their_memory(
    client: trocar.Client, server: RunningServer
) -> None:
    with client.prepare("identity", ROW, "identity") as prepared:
        prepared(ROW)
        assert prepared.is_shared
        try:
            state = server.run(lambda: server.app.lifecycle.drain(True))
            assert state.running_call_count == 0
            with pytest.raises(trocar.errors.ServerDrainingError):
                prepared(ROW)
        finally:
            server.run(lambda: server.app.lifecycle.drain(False))
        assert np.array_equal(prepared(ROW)["identity"], ROW)
        assert prepared.is_shared


def test_a_revoked_token_makes_no_prepared_calls(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_grants, "CHECK_EVERY_S", 0.0)
    server = serve(models=MODELS, data_dir=tmp_path, tokens=True, host=f"unix:{tmp_path}/s")
    file = TokenFile(tmp_path)
    _, token = file.add("alice", [Scope.RUN], expires_at_s=4_000_000_000, now_s=0.0)
    with (
        trocar.connect(server.app.rpc.address, token=token, retries=0) as client,
        client.prepare("identity", ROW, "identity") as prepared,
    ):
        prepared(ROW)
        assert prepared.is_shared
        file.revoke("alice")
        with pytest.raises(trocar.errors.TokenInvalidError):
            prepared(ROW)

        async def check() -> int:
            return server.app.rpc.running.check()

        server.run(check)
        wait_until(lambda: lent_bytes(server) == 0)


def test_a_stopping_server_finishes_the_call_and_another_one_is_used(tmp_path: Path, gate: Gate) -> None:
    host = f"unix:{tmp_path}/s"
    with ThreadPoolExecutor(1) as threads:
        with running_server(models=MODELS, device="cpu", host=host) as server:
            client = trocar.connect(server.app.rpc.address)
            prepared = client.prepare("gated", ROW, "last")
            expected = prepared(ROW)
            gate.hold()
            call = threads.submit(prepared, ROW)
            assert gate.entered.wait(WAIT_S)

            async def stop() -> None:
                server.app.rpc._prepared.stop()

            server.run(stop)
            gate.release()
            assert_same(call.result(WAIT_S), expected)
            wait_until(lambda: lent_bytes(server) == 0)
        with running_server(models=MODELS, device="cpu", host=host), client:
            client.wait_ready(60)
            prepared._again_at = 0.0

            def is_shared_again() -> bool:  # the call that finds the old connection ended is an `extract`
                assert_same(prepared(ROW), expected)
                return prepared.is_shared

            wait_until(is_shared_again)


_DOOMED = """
import sys, threading, numpy as np, trocar
client = trocar.connect(sys.argv[1])
prepared = client.prepare("gated", np.zeros((1, 3), np.float32), "last")
prepared(np.zeros((1, 3), np.float32))
assert prepared.is_shared
print("ready", flush=True)
sys.stdin.readline()
prepared(np.zeros((1, 3), np.float32))
"""


def test_a_killed_client_leaves_nothing(server: RunningServer, gate: Gate) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _DOOMED, server.app.rpc.address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as doomed:
        assert doomed.stdin is not None
        assert doomed.stdout is not None
        assert doomed.stdout.readline() == "ready\n"
        gate.hold()
        doomed.stdin.write("go\n")
        doomed.stdin.flush()
        assert gate.entered.wait(WAIT_S)
        assert lent_bytes(server) > 0
        os.kill(doomed.pid, signal.SIGKILL)
        assert gate.left.wait(WAIT_S)
        assert gate.was_aborted
    wait_until(lambda: lent_bytes(server) == 0 and server.app.rpc.running.work_count == 0)


def test_idle_memory_comes_back_and_is_lent_again(
    client: trocar.Client, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trocar_server.rpc.services.prepared_call_service.UNUSED_S", 0.05)
    with client.prepare("identity", ROW, "identity") as prepared:
        prepared(ROW)
        wait_until(lambda: lent_bytes(server) == 0)
        monkeypatch.undo()
        assert np.array_equal(prepared(ROW * 2)["identity"], ROW * 2)
        assert np.array_equal(prepared(ROW * 3)["identity"], ROW * 3)
        assert prepared.is_shared


def test_calls_of_one_caller_wait_in_one_line(
    client: trocar.Client, server: RunningServer, gate: Gate
) -> None:
    """A prepared call is admitted, and leased a replica, like any other."""
    with ThreadPoolExecutor(3) as threads, client.prepare("gated", ROW, "last") as prepared:
        prepared(ROW)
        gate.hold()
        calls = [threads.submit(prepared, ROW)]
        assert gate.entered.wait(WAIT_S)
        calls += [threads.submit(prepared, ROW), threads.submit(client.extract, "gated", ROW, "last")]
        wait_until(lambda: server.engine.admission.reserved()[2] == 3)
        wait_until(lambda: server.engine.deployment("gated").pool.waiting_count == 2)
        assert len(server.engine.admission.flows()) == 1
        gate.release()
        assert len({call.result(WAIT_S)["last"].tobytes() for call in calls}) == 1
