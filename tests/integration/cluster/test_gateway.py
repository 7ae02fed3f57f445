"""A gateway process before two servers, without Ray: what passes through, what is sent again, what waits."""

import asyncio
import socket
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

import trocar
from tests.support.models.gated_models import WAIT_S, Gate
from tests.support.models.odd_models import Identity
from tests.support.models.tiny_models import Plain
from tests.support.servers.gateway import MODELS, Gateway, is_serving
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import Serve, custom, rebuilt, tiny_models_config
from tests.support.servers.waiting import wait_until
from tests.support.wire.wire import raw_channel
from trocar.errors import DeadlineExceededError, ServerBusyError, UnknownModelError, UnknownModuleError
from trocar_api.v1 import trainer_pb2, trainer_pb2_grpc

ROW = np.ones((1, 3), np.float32)
IMAGES = np.random.default_rng(0).normal(size=(4, 3, 8, 8)).astype(np.float32)


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[RunningServer, RunningServer]]:
    models = {model_id: tiny_models_config()[model_id] for model_id in MODELS}
    with (
        running_server(models=models, device="cpu") as one,
        running_server(models=models, device="cpu") as two,
    ):
        yield one, two


@pytest.fixture(scope="module")
def gateway(servers: tuple[RunningServer, RunningServer]) -> Iterator[Gateway]:
    gateway = Gateway(*servers)
    yield gateway
    gateway.stop()


@pytest.fixture(autouse=True)
def _both(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "gateway" in request.fixturenames:
        request.getfixturevalue("gateway").serve(*request.getfixturevalue("servers"))


@pytest.fixture
def client(gateway: Gateway) -> Iterator[trocar.Client]:
    with trocar.connect(gateway.address, retries=0, direct=False) as connected:
        wait_until(lambda: is_serving(gateway))
        yield connected


def test_errors_are_those_of_the_server(
    client: trocar.Client, servers: tuple[RunningServer, RunningServer]
) -> None:
    def failure(of: trocar.Client) -> UnknownModuleError:
        with pytest.raises(UnknownModuleError) as failed:
            of.extract("plain", IMAGES, ["fcc"])
        return failed.value

    with trocar.connect(servers[0].address) as direct:
        expected = failure(direct)
    found = failure(client)
    assert (str(found), found.details) == (str(expected), expected.details)
    assert found.request_id


def test_inputs_of_many_messages_go_through(
    client: trocar.Client, servers: tuple[RunningServer, RunningServer]
) -> None:
    large = np.random.default_rng(1).normal(size=(1500, 3, 32, 32)).astype(np.float32)  # 18 MB
    with trocar.connect(servers[0].address) as direct:
        expected = direct.extract("plain", large, ["conv", "fc"])
    found = client.extract("plain", large, ["conv", "fc"])
    assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_a_deadline_stops_the_pass(client: trocar.Client, gate: Gate) -> None:
    gate.hold()
    with pytest.raises(DeadlineExceededError):
        client.extract("gated", ROW, ["last"], options=trocar.options(timeout_s=1.0))
    assert gate.left.wait(WAIT_S)
    assert gate.was_aborted


async def test_a_cancelled_call_stops_the_pass(gateway: Gateway, gate: Gate) -> None:
    gate.hold()
    async with trocar.aio.connect(gateway.address) as client:
        call = asyncio.create_task(client.extract("gated", ROW, ["last"]))
        await asyncio.to_thread(gate.entered.wait, WAIT_S)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await asyncio.to_thread(gate.left.wait, WAIT_S)
    assert gate.was_aborted


def test_what_a_draining_server_refuses_another_one_answers(
    client: trocar.Client, servers: tuple[RunningServer, RunningServer]
) -> None:
    with trocar.connect(servers[0].address) as direct:
        direct.drain()
        try:
            for _ in range(10):
                assert client.extract("plain", IMAGES, ["fc"])
            trainers = [client.train("plain", trainable=["fc"]) for _ in range(4)]
        finally:
            direct.drain(undo=True)
    made = {trainer.trainer_id for trainer in servers[1].app.trainers.all()}
    assert {trainer.trainer_id for trainer in trainers} <= made


def test_its_replica_waits_for_the_step_of_a_trainer(client: trocar.Client, gateway: Gateway) -> None:
    trainer_id = client.train("plain", trainable=["fc"]).trainer_id
    with raw_channel(gateway.address) as channel:
        request = trainer_pb2.GetTrainerRequest(trainer_id=trainer_id, waits_for_step=True)
        assert trainer_pb2_grpc.TrainerServiceStub(channel).GetTrainer(request).has_waited


def test_a_call_waits_for_a_replica(
    gateway: Gateway, client: trocar.Client, servers: tuple[RunningServer, RunningServer]
) -> None:
    gateway.serve()
    wait_until(lambda: not is_serving(gateway))
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(client.extract, "plain", IMAGES, ["fc"])
        assert not call.done()
        gateway.serve(*servers)
        assert call.result(WAIT_S)


def test_a_call_does_not_wait_for_ever() -> None:
    gateway = Gateway(hold_s=0.2)
    try:
        with trocar.connect(gateway.address, retries=0) as client, pytest.raises(ServerBusyError):
            client.extract("plain", IMAGES, ["fc"])
    finally:
        gateway.stop()


def test_a_trainer_is_not_unknown_while_a_replica_is_missing(
    gateway: Gateway, client: trocar.Client, servers: tuple[RunningServer, RunningServer]
) -> None:
    trainer = client.train("plain", trainable=["fc"])
    owner = next(
        server
        for server in servers
        if trainer.trainer_id in [found.trainer_id for found in server.app.trainers.all()]
    )
    other = next(server for server in servers if server is not owner)
    gateway.serve(other, wanted=2)
    with ThreadPoolExecutor(1) as thread:
        call = thread.submit(lambda: client.trainer(trainer.trainer_id).trainer_id)
        gateway.serve(*servers, wanted=2)
        assert call.result(WAIT_S) == trainer.trainer_id


def test_a_call_of_a_dead_server_is_answered_by_another(serve: Serve, tmp_path: Path) -> None:
    models: dict[str, Any] = {"plain": tiny_models_config()["plain"], "identity": custom(Identity)}
    with running_server(models=models, device="cpu") as dead:
        gateway = Gateway(dead, serve(models=models))
        with trocar.connect(gateway.address, retries=0, direct=False) as client:
            assert client.extract("plain", IMAGES, ["fc"])
    try:
        with trocar.connect(gateway.address, retries=0, direct=False) as client:
            for _ in range(5):
                assert client.extract("plain", IMAGES, ["fc"])
    finally:
        gateway.stop()


def test_a_change_waits_though_a_dead_replica_is_still_listed(serve: Serve) -> None:
    """The reports of a lost node stay for some seconds; a call that reached nobody waits for what follows."""
    models = {"plain": tiny_models_config()["plain"]}
    with running_server(models=models, device="cpu") as dead:
        gateway = Gateway(dead, models=("plain",))
        wait_until(lambda: is_serving(gateway))
    try:
        with (
            trocar.connect(gateway.address, retries=0, direct=False) as client,
            ThreadPoolExecutor(1) as thread,
        ):
            edit = trocar.edit("conv", "scale", 2.0)
            call = thread.submit(client.store_edits, "plain", "doubled", edit)
            gateway.serve(dead)
            gateway.serve(serve(models=models))
            assert call.result(WAIT_S).name == "doubled"
    finally:
        gateway.stop()


def test_rows_of_callers_never_mix(
    gateway: Gateway, servers: tuple[RunningServer, RunningServer], client: trocar.Client
) -> None:
    """4,000 rows with the marks of 8 callers, through two gateways and directly: each gets its own, only."""
    other, model = Gateway(*servers), rebuilt(Plain)

    def foreign_rows(mark: int) -> int:
        address, count = (gateway, other)[mark % 2].address, 0
        with trocar.connect(address, token=f"caller {mark}", direct=mark % 4 < 2) as own:
            for number in range(25):
                rows = np.random.default_rng([mark, number]).normal(mark, size=(20, 3, 8, 8))
                images = rows.astype(np.float32)
                found = own.extract("plain", images, ["/in", "fc"])
                with torch.no_grad():
                    expected = model(torch.from_numpy(images)).numpy()
                same = (found["/in"] == images).reshape(20, -1).all(1) & (found["fc"] == expected).all(1)
                count += int((~same).sum())
        return count

    try:
        wait_until(lambda: is_serving(other))
        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(foreign_rows, range(8))) == [0] * 8
    finally:
        other.stop()


def test_metrics_of_all_replicas_are_one_page(serve: Serve) -> None:
    models = {"plain": tiny_models_config()["plain"]}
    settings: dict[str, Any] = {"models": models, "metrics_port": 0}
    servers = [serve(**settings) for _ in range(2)]
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    gateway = Gateway(*servers, models=("plain",), metrics_port=port)

    def page() -> list[Any]:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
            families = list(text_string_to_metric_families(reply.read().decode()))
        assert len({family.name for family in families}) == len(families)
        return [sample for family in families for sample in family.samples]

    def calls() -> float:
        name = "grpc_server_handled_total"
        found = [one for one in page() if one.name == name and one.labels["grpc_method"] == "Extract"]
        assert {one.labels["replica"] for one in found} <= {"plain/0", "plain/1"}
        return sum(float(one.value) for one in found)

    try:
        wait_until(lambda: is_serving(gateway))
        with trocar.connect(gateway.address, direct=False) as client:
            for _ in range(4):
                client.extract("plain", IMAGES, ["fc"])
        wait_until(lambda: calls() == 4)
        up = [one.labels["replica"] for one in page() if one.name == "trocar_replica_up" and one.value]
        assert up == ["plain/0", "plain/1"]
    finally:
        gateway.stop()


def test_a_model_that_is_published_anew_on_another_replica_is_found_there(
    client: trocar.Client, servers: tuple[RunningServer, RunningServer]
) -> None:
    for server in (servers[0], servers[1], servers[0]):
        with trocar.connect(server.address) as direct:
            direct.train("plain", trainable=["fc"]).publish("moves")
            expected = direct.extract("moves", IMAGES, ["fc"])["fc"]
            assert np.array_equal(client.extract("moves", IMAGES, ["fc"])["fc"], expected)
            direct.unpublish("moves")
    with pytest.raises(UnknownModelError):
        client.extract("moves", IMAGES, ["fc"])


def test_a_gateway_that_stops_waits_for_its_calls_as_replicas_do(
    servers: tuple[RunningServer, RunningServer], gate: Gate
) -> None:
    gateway = Gateway(*servers, grace_s=0.1)
    with trocar.connect(gateway.address, retries=0, direct=False) as client, ThreadPoolExecutor(2) as pool:
        wait_until(lambda: is_serving(gateway))
        gate.hold()
        call = pool.submit(client.extract, "gated", ROW, ["last"])
        assert gate.entered.wait(WAIT_S)
        stop = pool.submit(gateway.stop)
        assert wait((stop,), timeout=1.0).not_done
        assert not call.done()
        gate.release()
        assert "last" in call.result(WAIT_S)
        stop.result(WAIT_S)


def test_a_gateway_that_stops_waits_no_longer_than_it_may(
    servers: tuple[RunningServer, RunningServer], gate: Gate
) -> None:
    gateway = Gateway(*servers, grace_s=0.1, drain_s=0.0)
    with trocar.connect(gateway.address, retries=0, direct=False) as client, ThreadPoolExecutor(2) as pool:
        wait_until(lambda: is_serving(gateway))
        gate.hold()
        call = pool.submit(client.extract, "gated", ROW, ["last"])
        assert gate.entered.wait(WAIT_S)
        pool.submit(gateway.stop).result(10.0)
        assert isinstance(call.exception(WAIT_S), trocar.TrocarError)


def test_a_gateway_that_stops_does_not_wait_for_those_that_only_watch(
    servers: tuple[RunningServer, RunningServer],
) -> None:
    gateway = Gateway(*servers, grace_s=0.1)
    with raw_channel(gateway.address) as channel, ThreadPoolExecutor(1) as pool:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest())
        next(watch)
        pool.submit(gateway.stop).result(10.0)
        watch.cancel()
