"""More than the server can do: who is served, who is refused, and that nothing stays behind.

Nothing here depends on time: passes are held up by events. Figures are `python -m benchmarks.overload`'s.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import trocar
from tests.support.models.gated_models import WAIT_S, Gate, StuckInOneModule
from tests.support.models.odd_models import Identity
from tests.support.models.overload_models import ORDER, Hungry, Marked, Memory, Wide
from tests.support.models.trainable_nets import TinyNet
from tests.support.oracles.oracle import Array
from tests.support.oracles.tiny_training import MODELS as TINY_TRAINING
from tests.support.oracles.tiny_training import make_trainer
from tests.support.servers.footprint import hook_counts
from tests.support.servers.running_server import RunningServer
from tests.support.servers.serving import Serve, custom, rebuilt
from tests.support.wire.wire import chunk, extract_call, raw_channel, request, send, tensor
from trocar._cli.app import main
from trocar_api.v1 import execution_pb2
from trocar_server.config import Limits
from trocar_server.engine.schedule.admission import MethodClass
from trocar_server.errors import busy
from trocar_server.training.trainer import Trainer

NOTHING = (0, 0.0, 0)
FLOOD, SINGLE = 200, 1000.0


def row(mark: float = 1.0) -> Array:
    return np.full((1, 3), mark, np.float32)


def eventually(server: RunningServer, holds: Callable[[], bool]) -> bool:
    """Look until something holds; each look is a turn of the server's own loop."""

    async def look() -> bool:
        await asyncio.sleep(0.001)
        return holds()

    return any(server.run(look) for _ in range(20_000))


def nothing_is_held(server: RunningServer) -> bool:
    return eventually(server, lambda: server.engine.admission.reserved() == NOTHING)


def waiting(server: RunningServer, model_id: str, count: int) -> bool:
    pool = server.engine.deployment(model_id).pool
    return eventually(server, lambda: pool.waiting_count == count)


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as threads:
        yield threads


@pytest.fixture
def marked(serve: Serve, gate: Gate) -> RunningServer:
    """A server whose model notes in which order it is called; its line holds a flood."""
    running = serve(models={"marked": custom(Marked)}, limits={"max_queue": 2 * FLOOD})
    with trocar.connect(running.address) as client:
        client.extract("marked", row(), "last")
    ORDER.clear()
    gate.reset()
    return running


async def flooded(address: str, running: RunningServer, gate: Gate, singles: list[tuple[str, float]]) -> None:
    """Let one principal make `FLOOD` calls, then others one each, and serve them all."""
    async with trocar.aio.connect(address, token="flood") as flood:
        gate.hold()
        tasks = [asyncio.ensure_future(flood.extract("marked", row(mark), "last")) for mark in range(FLOOD)]
        assert await asyncio.to_thread(waiting, running, "marked", FLOOD - 1)
        for count, (token, mark) in enumerate(singles):
            client = trocar.aio.connect(address, token=token)
            tasks.append(asyncio.ensure_future(client.extract("marked", row(mark), "last")))
            assert await asyncio.to_thread(waiting, running, "marked", FLOOD + count)
        gate.release()
        await asyncio.gather(*tasks)


async def test_a_single_call_is_served_at_the_next_turn_of_a_flood(marked: RunningServer, gate: Gate) -> None:
    await flooded(marked.address, marked, gate, [("single", SINGLE)])
    assert ORDER.index(SINGLE) <= 2
    assert sorted(ORDER) == [*range(FLOOD), SINGLE]


async def test_every_single_caller_has_a_turn_of_his_own(marked: RunningServer, gate: Gate) -> None:
    singles = [(f"caller {number}", SINGLE + number) for number in range(5)]
    await flooded(marked.address, marked, gate, singles)
    assert max(ORDER.index(mark) for _, mark in singles) <= 7


async def test_callers_without_names_are_told_apart_by_their_connection(
    marked: RunningServer, gate: Gate
) -> None:
    own_connection = {"use_local_subchannel_pool": 1}  # gRPC shares those of one process otherwise
    message = request("marked", "last", chunks=[chunk(row(SINGLE).tobytes())])
    async with trocar.aio.connect(marked.address) as flood:
        with raw_channel(marked.address, **own_connection) as single:
            gate.hold()
            tasks = [asyncio.ensure_future(flood.extract("marked", row(mark), "last")) for mark in range(50)]
            assert await asyncio.to_thread(waiting, marked, "marked", 49)
            alone = asyncio.ensure_future(asyncio.to_thread(send, single, message))
            assert await asyncio.to_thread(waiting, marked, "marked", 50)
            gate.release()
            await asyncio.gather(alone, *tasks)
    assert ORDER.index(SINGLE) <= 2


def test_the_status_tells_what_waits_who_computes_and_what_is_cached(
    marked: RunningServer, gate: Gate, background: ThreadPoolExecutor, capfd: pytest.CaptureFixture[str]
) -> None:
    tokens = ("alice", "bob")
    names = [hashlib.sha256(token.encode()).hexdigest()[:12] for token in tokens]
    gate.hold()
    with (
        trocar.connect(marked.address) as operator,
        trocar.connect(marked.address, token="alice") as alice,
        trocar.connect(marked.address, token="bob") as bob,
    ):
        calls = [background.submit(alice.extract, "marked", row(), "last")]
        assert gate.entered.wait(WAIT_S)
        for count, client in enumerate((alice, bob, bob), 1):
            calls.append(background.submit(client.extract, "marked", row(float(count)), "last"))
            assert waiting(marked, "marked", count)
        busy_status = operator.status()
        with pytest.raises(SystemExit) as stopped:
            main(["status", "--json", "--server", marked.address])
        assert not stopped.value.code
        printed = json.loads(capfd.readouterr().out)
        gate.release()
        for call in calls:
            call.result(WAIT_S)
        with alice.train("marked", losses="mse") as trainer:
            assert trainer.trainer_id in [queue.model_id for queue in operator.status().queues]
        assert nothing_is_held(marked)
        idle = operator.status()
    (queue,) = busy_status.queues
    assert (queue.model_id, queue.replica_count, queue.leased_count, queue.waiting_count) == (
        "marked",
        1,
        1,
        3,
    )
    assert queue.pending_s > 0
    callers = {one.caller: one for one in busy_status.callers}
    assert [(callers[name].call_count, callers[name].waiting_count) for name in names] == [(2, 1), (2, 2)]
    assert all(callers[name].byte_count > 0 for name in names)
    assert (busy_status.total.call_count, busy_status.total.waiting_count) == (4, 3)
    assert printed["status"]["queues"][0]["waiting_count"] == 3
    assert printed["server"]["version"] == trocar.__version__
    assert [*printed["status"]] == ["queues", "callers", "total", "caches", "device"]
    assert (idle.total.call_count, idle.total.byte_count, idle.queues[0].waiting_count) == (0, 0, 0)
    used = {one.caller: one for one in idle.callers}
    assert all(used[name].used_s > 0 for name in names)
    assert sum(idle.share(one) for one in idle.callers) == pytest.approx(1)


def test_priorities_order_the_calls_of_one_caller(
    marked: RunningServer, gate: Gate, background: ThreadPoolExecutor
) -> None:
    def call(mark: float, priority: Any) -> object:
        values = row(mark)
        message = request("marked", "last", inputs=[tensor((1, 3))], chunks=[chunk(values.tobytes())])
        message.execution.priority = priority
        return send(channel, message)

    with raw_channel(marked.address) as channel:
        gate.hold()
        calls = [background.submit(call, 0.0, execution_pb2.PRIORITY_NORMAL)]
        assert gate.entered.wait(WAIT_S)
        order = [execution_pb2.PRIORITY_LOW, execution_pb2.PRIORITY_UNSPECIFIED, execution_pb2.PRIORITY_HIGH]
        for count, priority in enumerate(order, 1):
            calls.append(background.submit(call, float(count), priority))
            assert waiting(marked, "marked", count)
        gate.release()
        for made in calls:
            made.result(WAIT_S)
    assert ORDER == [0.0, 3.0, 2.0, 1.0]


def test_a_full_line_takes_a_single_caller_in_place_of_the_last_of_a_flood(
    serve: Serve, gate: Gate, background: ThreadPoolExecutor
) -> None:
    running = serve(models={"marked": custom(Marked)}, limits={"max_queue": 3})
    with (
        trocar.connect(running.address, token="flood", retries=0) as flood,
        trocar.connect(running.address, token="single", retries=0) as single,
    ):
        flood.extract("marked", row(), "last")
        gate.hold()
        calls = [background.submit(flood.extract, "marked", row(), "last")]
        assert gate.entered.wait(WAIT_S)
        for count in (1, 2, 3):
            calls.append(background.submit(flood.extract, "marked", row(), "last"))
            assert waiting(running, "marked", count)
        with pytest.raises(trocar.errors.ServerBusyError, match="3 calls already wait"):
            flood.extract("marked", row(), "last")
        own = background.submit(single.extract, "marked", row(), "last")
        with pytest.raises(trocar.errors.ServerBusyError, match="others share the queue") as caught:
            calls[3].result(WAIT_S)
        assert caught.value.retry_after_s is not None
        gate.release()
        assert [list(call.result(WAIT_S)) for call in (*calls[:3], own)] == [["last"]] * 4
    assert nothing_is_held(running)


# --- Admission -------------------------------------------------------------------------------------------


@pytest.fixture
def narrow(serve: Serve) -> RunningServer:
    """A server with room for about 1 MiB of one caller."""
    return serve(
        models={"wide": custom(Wide), "stuck": custom(StuckInOneModule), "identity": custom(Identity)},
        limits={"max_pending_bytes": 4 << 20, "max_principal_bytes": 1 << 20, "max_batch": 1 << 20},
    )


def test_what_fits_never_is_refused_for_good_and_says_what_would(narrow: RunningServer) -> None:
    with trocar.connect(narrow.address) as client:
        with pytest.raises(trocar.errors.RequestTooLargeError, match="a batch of 3 at most"):
            client.extract("wide", np.ones((4, 3), np.float32), "last")
        assert client.extract("wide", np.ones((3, 3), np.float32), "last")["last"].shape == (3, 1 << 16)
    assert nothing_is_held(narrow)


def test_what_does_not_fit_now_is_refused_until_others_have_ended(
    narrow: RunningServer, gate: Gate, background: ThreadPoolExecutor
) -> None:
    inputs = np.ones((40_000, 3), np.float32)  # 480,000 bytes, and as many come back
    with trocar.connect(narrow.address, token="alice", retries=0) as alice:
        alice.extract("identity", inputs, "identity")
        gate.hold()
        first = background.submit(
            alice.extract, "stuck", inputs[:1000], "last", options=trocar.options(timeout_s=WAIT_S)
        )
        assert gate.entered.wait(WAIT_S)
        second = background.submit(
            alice.extract, "identity", inputs, "identity", options=trocar.options(timeout_s=WAIT_S)
        )
        assert eventually(narrow, lambda: narrow.engine.admission.reserved()[0] == 24_000 + 960_000)
        with pytest.raises(trocar.errors.ServerBusyError, match="send a batch of") as caught:
            alice.extract("identity", inputs, "identity")
        assert int(caught.value.details["fitting_rows"]) < 10_000
        assert caught.value.retry_after_s is not None
        with trocar.connect(narrow.address, token="bob") as bob:
            other = background.submit(
                bob.extract, "identity", inputs, "identity", options=trocar.options(timeout_s=WAIT_S)
            )
            assert eventually(narrow, lambda: narrow.engine.admission.reserved()[0] == 24_000 + 2 * 960_000)
            gate.release()
            assert [len(call.result(WAIT_S)) for call in (first, second, other)] == [1, 1, 1]
        assert np.array_equal(alice.extract("identity", inputs, "identity")["identity"], inputs)
    assert nothing_is_held(narrow)


@pytest.mark.parametrize(("retries", "is_served"), [(2, True), (1, False)])
def test_a_client_comes_again_when_it_was_told_to(
    narrow: RunningServer, monkeypatch: pytest.MonkeyPatch, retries: int, is_served: bool
) -> None:
    refusals = [0.01, 0.02]

    def full_twice(*_: Any) -> None:
        if refusals:
            raise busy("full", refusals.pop())

    monkeypatch.setattr(narrow.engine.admission, "check_bytes", full_twice)
    with trocar.connect(narrow.address, retries=retries) as client:
        if is_served:
            assert np.array_equal(client.extract("identity", row(), "identity")["identity"], row())
        else:
            with pytest.raises(trocar.errors.ServerBusyError) as caught:
                client.extract("identity", row(), "identity")
            assert caught.value.retry_after_s == 0.05  # the least that the server says
    assert not refusals


@pytest.mark.parametrize("ending", ["cut short", "too much", "cancelled", "gone", "deadline", "model fails"])
def test_whatever_ends_a_call_its_budget_comes_back(narrow: RunningServer, gate: Gate, ending: str) -> None:
    head = request("identity", inputs=[tensor((1000, 3))], chunks=[chunk(bytes(100))])
    with raw_channel(narrow.address) as channel:
        if ending == "cut short":
            with pytest.raises(trocar.errors.InvalidTensorError):
                send(channel, head)
        elif ending == "too much":
            with pytest.raises(trocar.errors.InvalidTensorError):
                send(channel, head, request(chunks=[chunk(bytes(1 << 16), offset=100)]))
        elif ending == "model fails":
            wrong = request("stuck", "last", inputs=[tensor((1, 4))], chunks=[chunk(bytes(16))])
            with pytest.raises(trocar.errors.InputRejectedError):
                send(channel, wrong)
        else:
            gate.hold()
            rows = request("stuck", "last", chunks=[chunk(bytes(12))]).SerializeToString()
            timeout = 0.3 if ending == "deadline" else WAIT_S
            call = extract_call(channel, [rows], timeout=timeout)
            assert gate.entered.wait(WAIT_S)
            assert narrow.engine.admission.reserved()[:1] == (24,)
            if ending == "cancelled":
                call.cancel()
            elif ending == "gone":
                channel.close()
            else:
                with pytest.raises(grpc.RpcError):
                    list(call)
            gate.release()
        assert nothing_is_held(narrow)


@pytest.mark.parametrize("kind", ["step", "evaluate"])
def test_steps_of_a_trainer_count_by_what_such_steps_took(
    serve: Serve, gate: Gate, background: ThreadPoolExecutor, kind: str
) -> None:
    """As passes do: one is always let in, and beside it no more than fits the seconds of its caller."""
    running = serve(models={"stuck": custom(StuckInOneModule)}, limits={"max_principal_s": 1e-9})
    with trocar.connect(running.address, retries=0) as client, client.train("stuck", losses="mse") as trainer:
        call = getattr(trainer, kind)
        for _ in range(3):
            call(row(), row())
        assert nothing_is_held(running)
        gate.hold()
        first = background.submit(call, row(), row())
        assert gate.entered.wait(WAIT_S)
        assert 0 < running.engine.admission.reserved()[1] < WAIT_S
        with pytest.raises(trocar.errors.ServerBusyError, match="your admitted calls need"):
            call(row(), row())
        gate.release()
        first.result(WAIT_S)
        call(row(), row())
    assert nothing_is_held(running)


@pytest.mark.parametrize("free_bytes", [0, 1 << 20])
def test_an_export_is_copied_once_there_is_room(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int
) -> None:
    running = serve(models=TINY_TRAINING, limits={"max_pending_bytes": 8 << 20})
    admission = running.engine.admission
    others = admission.admit(MethodClass.DATA, "others")
    weights = sum(tensor.nbytes for tensor in rebuilt(TinyNet).state_dict().values())
    reserved: list[int] = []

    async def fill() -> None:
        others.__enter__().add(taken)

    async def end() -> None:
        others.__exit__(None, None, None)

    def counted(trainer: Trainer, **options: bool) -> Any:
        reserved.append(admission.reserved(kind=MethodClass.DATA)[0] - taken)
        return export(trainer, **options)

    export, taken = Trainer.export, (2 << 20) - free_bytes  # of 2 MiB for the class
    monkeypatch.setattr(Trainer, "export", counted)
    with trocar.connect(running.address, retries=0) as client:
        trainer = make_trainer(client)
        running.run(fill)
        if free_bytes:
            trainer.export(tmp_path / "a.safetensors")
        else:
            with pytest.raises(trocar.errors.ServerBusyError):
                trainer.export(tmp_path / "a.safetensors")
        running.run(end)
    assert reserved == ([weights] if free_bytes else [])


def test_an_export_over_the_budget_is_made_alone(serve: Serve, tmp_path: Path) -> None:
    running = serve(models=TINY_TRAINING, limits={"max_pending_bytes": 1 << 10})
    with trocar.connect(running.address) as client:
        path = make_trainer(client).export(tmp_path / "a.safetensors")
    assert path.stat().st_size > 1 << 10
    assert running.engine.admission.reserved()[0] == 0


def test_a_stream_waits_for_room_and_gives_back_what_it_had(narrow: RunningServer) -> None:
    batches = [np.full((30_000, 3), mark, np.float32) for mark in range(8)]
    with (
        trocar.connect(narrow.address) as client,
        client.extract_stream("identity", iter(batches), "identity", window=8) as stream,
    ):
        found = [result.unwrap()["identity"] for result in stream]
    assert all(np.array_equal(one, other) for one, other in zip(found, batches, strict=True))
    assert nothing_is_held(narrow)


def test_a_batch_of_a_stream_that_never_fits_fails_alone(narrow: RunningServer) -> None:
    batches = [np.ones((1, 3), np.float32), np.ones((87_500, 3), np.float32), np.ones((1, 3), np.float32)]
    with (
        trocar.connect(narrow.address) as client,
        client.extract_stream("identity", iter(batches), "identity") as stream,
    ):
        errors = [result.error for result in stream]
    assert [type(error) for error in errors] == [type(None), trocar.errors.RequestTooLargeError, type(None)]
    assert nothing_is_held(narrow)


def test_limits_are_told_with_numbers(narrow: RunningServer, server: RunningServer) -> None:
    with trocar.connect(narrow.address) as client:
        limits = client.server_info().limits
    assert (limits.max_pending_bytes, limits.max_principal_bytes) == (4 << 20, 1 << 20)
    assert limits.max_pending_s == Limits().max_pending_s
    with trocar.connect(server.address) as client:
        limits = client.server_info().limits
    assert 0 < limits.max_principal_bytes < limits.max_pending_bytes < 1 << 44


# --- What never waits ------------------------------------------------------------------------------------


def test_health_and_lists_answer_while_everything_is_taken(
    serve: Serve, gate: Gate, background: ThreadPoolExecutor
) -> None:
    """The owner thread is held, the line is full, and no byte is left of any budget."""
    running = serve(models={"stuck": custom(StuckInOneModule)}, limits={"max_queue": 1})
    with trocar.connect(running.address, retries=0, timeout_s=WAIT_S) as client:
        trainer = client.train("stuck", trainable=["last"])
        client.extract("stuck", row(), "last")
        gate.hold()
        calls = [background.submit(client.extract, "stuck", row(), "last")]
        assert gate.entered.wait(WAIT_S)
        calls.append(background.submit(client.extract, "stuck", row(), "last"))
        assert waiting(running, "stuck", 1)
        with running.engine.admission.admit(MethodClass.EXTRACT, "somebody") as taken:
            taken.add(1 << 50)
            with pytest.raises(trocar.errors.ServerBusyError):
                client.extract("stuck", row(), "last")
            with raw_channel(running.address) as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                reply = stub.Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
            assert client.server_info().version
            assert [model.model_id for model in client.models()] == ["stuck"]
            assert client.modules("stuck")["last"].call_count == 1
            assert [info.trainer_id for info in client.trainers()] == [trainer.trainer_id]
            assert client.trainer(trainer.trainer_id).info().trainable == ("last.weight", "last.bias")
            assert client.datasets() == []
            assert client.stored_edits() == []
        gate.release()
        assert [len(call.result(WAIT_S)) for call in calls] == [1, 1]


# --- Memory ----------------------------------------------------------------------------------------------


def test_a_pass_without_memory_says_what_it_needed_and_the_next_one_works(serve: Serve) -> None:
    running = serve(models={"hungry": custom(Hungry)})
    with trocar.connect(running.address) as client:
        expected = client.extract("hungry", row(), ["first", "last"])
        hooks = hook_counts(running)
        Memory.failures = 1
        with pytest.raises(trocar.errors.ServerOutOfMemoryError, match="Tried to allocate 20") as caught:
            client.extract("hungry", row(), ["first", "last"])
        assert f"needs about {int(caught.value.details['needed_bytes']):,} bytes" in str(caught.value)
        found = client.extract("hungry", row(), ["first", "last"])
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert hook_counts(running) == hooks
    assert nothing_is_held(running)


def test_a_reader_that_stalls_for_too_long_loses_his_call(serve: Serve) -> None:
    running = serve(models={"wide": custom(Wide)}, limits={"stall_timeout_s": 0.2})
    rows = np.ones((256, 3), np.float32)
    message = request("wide", "last", inputs=[tensor(rows.shape)], chunks=[chunk(rows.tobytes())])
    with raw_channel(running.address) as channel:
        call = extract_call(channel, [message.SerializeToString()])
        next(call)
        assert nothing_is_held(running)
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


def test_sixty_four_stalled_readers_hold_no_replica_and_little_memory(serve: Serve) -> None:
    """What is kept for each is what is still to be sent, and counted."""
    running = serve(models={"wide": custom(Wide)}, limits={"max_pending_bytes": 4 << 30})
    rows = np.ones((8, 3), np.float32)  # 2 MiB come back
    message = request("wide", "last", inputs=[tensor(rows.shape)], chunks=[chunk(rows.tobytes())])
    with raw_channel(running.address) as channel, trocar.connect(running.address) as client:
        calls = [extract_call(channel, [message.SerializeToString()]) for _ in range(64)]
        for call in calls:
            next(call)
        assert running.engine.deployment("wide").pool.leased_count == 0
        held_bytes, _, call_count = running.engine.admission.reserved()
        assert call_count <= 64
        assert held_bytes <= call_count * (4 << 20)
        assert client.extract("wide", rows[:1], "last")["last"].shape == (1, 1 << 16)
        for call in calls:
            call.cancel()
    assert nothing_is_held(running)
