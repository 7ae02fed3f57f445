"""A draining server: what it refuses, what it finishes, and that it can accept work again."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

import trocar
from tests.integration.training.test_fits import BATCH, EPOCHS, fitted_plainly, samples
from tests.integration.training.test_trainers import assert_equal, exported, make_trainer
from tests.support.models.gated_models import WAIT_S, Gate, Gated
from tests.support.models.odd_models import Identity
from tests.support.servers.running_server import RunningServer
from tests.support.servers.serving import Serve, custom
from tests.support.wire.wire import extract_call, raw_channel
from trocar._cli import main
from trocar._cli.commands.server import operating_commands
from trocar_api.reasons import ErrorReason
from trocar_server.config import ServerConfig
from trocar_server.errors import ServiceError
from trocar_server.rpc.call.drain import is_work
from trocar_server.rpc.call.method_scopes import METHOD_SCOPES
from trocar_server.training.fit.fitting import Command
from trocar_server.training.trainer import Trainer

ROW = np.zeros((1, 3), np.float32)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def running(serve: Serve, tmp_path: Path) -> RunningServer:
    models = {"identity": custom(Identity), "gated": custom(Gated), "resnet18": {"weights": "random:0"}}
    return serve(models=models, data_dir=tmp_path)


@pytest.fixture
def client(running: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(running.address, retries=0) as connected:
        yield connected


def health(running: RunningServer) -> int:
    with raw_channel(running.address) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            health_pb2.HealthCheckRequest.SerializeToString,
            health_pb2.HealthCheckResponse.FromString,
        )
        return int(check(health_pb2.HealthCheckRequest(), timeout=WAIT_S).status)


def test_new_work_is_refused_until_the_server_takes_work_again(
    running: RunningServer, client: trocar.Client
) -> None:
    assert client.drain() == trocar.DrainState(True, 0, 0)
    assert client.drain() == trocar.DrainState(True, 0, 0)
    assert health(running) == NOT_SERVING
    assert client.server_info().is_draining
    with pytest.raises(trocar.errors.ServerDrainingError) as caught:
        client.extract("identity", ROW, "identity")
    assert caught.value.reason == "SERVER_DRAINING"
    with pytest.raises(trocar.errors.ServerDrainingError):
        make_trainer(client, ("fc",))
    assert [model.model_id for model in client.models()] == ["gated", "identity", "resnet18"]
    assert client.drain(undo=True) == trocar.DrainState(False, 0, 0)
    assert health(running) == SERVING
    assert np.array_equal(client.extract("identity", ROW, "identity")["identity"], ROW)


def test_a_refusal_has_the_code_with_which_clients_go_elsewhere(
    running: RunningServer, client: trocar.Client
) -> None:
    client.drain()
    with raw_channel(running.address) as channel:
        call = extract_call(channel, [b""])
        with pytest.raises(grpc.RpcError):
            list(call)
        assert call.code() is grpc.StatusCode.UNAVAILABLE


def test_a_call_that_runs_ends_as_if_nothing_had_happened(client: trocar.Client, gate: Gate) -> None:
    gate.hold()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(client.extract("gated", ROW, "last/in")))
    thread.start()
    assert gate.entered.wait(WAIT_S)
    assert client.drain().running_call_count == 1
    gate.release()
    thread.join(WAIT_S)
    assert np.array_equal(found[0]["last/in"], ROW)
    assert client.drain().running_call_count == 0


def test_a_wait_for_a_drain_does_not_repeat_a_drain_that_another_operator_undid(
    running: RunningServer,
    client: trocar.Client,
    gate: Gate,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gate.hold()
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            client.drain(undo=True)
        assert len(pauses) <= 2

    monkeypatch.setattr(operating_commands, "time", SimpleNamespace(sleep=pause))
    with ThreadPoolExecutor(1) as pool:
        extraction = pool.submit(client.extract, "gated", ROW, "last/in")
        assert gate.entered.wait(WAIT_S)
        try:
            with pytest.raises(SystemExit) as ended:
                main(["admin", "drain", "--wait", "--server", running.address])
        finally:
            gate.release()
        assert np.array_equal(extraction.result(WAIT_S)["last/in"], ROW)
    assert (ended.value.code, len(pauses)) == (1, 2)
    assert "the drain was undone" in capsys.readouterr().err
    assert not client.server_info().is_draining


def test_a_fit_waits_and_goes_on(client: trocar.Client) -> None:
    trainer = make_trainer(client, ("fc",))
    events = trainer.watch(trainer.start_fit(samples(), epochs=100_000, batch_size=BATCH))
    next(event for event in events if event.kind == "step")
    assert client.drain().waiting_fit_count == 1
    step = trainer.info().update_count
    with pytest.raises(trocar.errors.ServerDrainingError):
        trainer.cancel()
    assert trainer.info().update_count == step
    assert client.drain(undo=True).waiting_fit_count == 0
    next(event for event in events if event.kind == "step" and event["step"] > step)
    trainer.cancel()


def test_a_fit_that_waited_comes_to_the_same_end(client: trocar.Client, tmp_path: Path) -> None:
    expected = fitted_plainly(("fc",))
    trainer = make_trainer(client, ("fc",))
    first = trainer.start_fit(samples(), epochs=EPOCHS, batch_size=BATCH)
    for event in trainer.watch(first):
        if event.kind == "step":  # it may have come to its end meanwhile
            client.drain()
            client.drain(undo=True)
    assert_equal(exported(trainer, tmp_path / "fitted.safetensors"), expected)


def control(running: RunningServer, trainer: trocar.training.Trainer, command: Command) -> str:
    """Do what a call does that came just before the drain."""
    (own,) = running.app.trainers.all()
    return running.run(lambda: running.app.fits.control(own.principal, trainer.trainer_id, command))


def test_a_fit_paused_while_the_server_drains_stays_paused_afterwards(
    running: RunningServer, client: trocar.Client
) -> None:
    trainer = make_trainer(client, ("fc",))
    first = trainer.start_fit(samples(), epochs=100_000, batch_size=BATCH)
    next(event for event in trainer.watch(first) if event.kind == "step")
    client.drain()
    assert control(running, trainer, Command.PAUSE) == "paused"
    assert client.drain().waiting_fit_count == 0
    (own,) = running.app.trainers.all()
    assert own.stored_facts["fit"]["is_paused"]
    client.drain(undo=True)
    assert trainer.info().state == "paused"
    (run,) = running.app.fits._runs.values()
    assert not run.goes_on.is_set()
    assert trainer.resume() == "running"
    trainer.cancel()
    assert {"paused", "resumed"} <= {event.kind for event in trainer.watch(first)}


def test_a_fit_resumed_while_the_server_drains_waits_for_its_end(
    running: RunningServer, client: trocar.Client
) -> None:
    trainer = make_trainer(client, ("fc",))
    events = trainer.watch(trainer.start_fit(samples(), epochs=100_000, batch_size=BATCH))
    next(event for event in events if event.kind == "step")
    trainer.pause()
    client.drain()
    step = trainer.info().update_count
    assert control(running, trainer, Command.RESUME) == "running"
    assert client.drain().waiting_fit_count == 1
    assert trainer.info().update_count == step
    client.drain(undo=True)
    next(event for event in events if event.kind == "step" and event["step"] > step)
    trainer.cancel()


def held_fit(client: trocar.Client, gate: Gate) -> trocar.training.Trainer:
    """Start a fit, one of whose steps waits at the gate."""
    trainer = client.train("gated", trainable=["last"], optimizer=trocar.training.sgd(lr=0.1))
    data = np.ones((8, 3), np.float32), np.arange(8) % 3
    events = trainer.watch(trainer.start_fit(data, epochs=100_000, batch_size=2, feature_cache=False))
    next(event for event in events if event.kind == "step")
    gate.hold()
    assert gate.entered.wait(WAIT_S)
    return trainer


def test_a_drain_whose_caller_has_left_saves_the_fits(
    running: RunningServer, client: trocar.Client, gate: Gate
) -> None:
    trainer = held_fit(client, gate)

    async def leave() -> None:
        draining = asyncio.create_task(running.app.lifecycle.drain(True))
        (run,) = running.app.fits._runs.values()
        while run.goes_on.is_set():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        draining.cancel()
        asyncio.get_running_loop().call_soon(gate.release)
        with suppress(asyncio.CancelledError):
            await draining

    running.run(leave)
    assert trainer.checkpoints()[-1].update_count == trainer.info().update_count > 0
    assert client.drain().waiting_fit_count == 1


def test_a_drain_does_not_wait_for_a_reload(running: RunningServer, client: trocar.Client) -> None:
    """A reload may load models for minutes, and the drained server is to be stopped."""
    began, may_end = threading.Event(), threading.Event()
    lifecycle = running.app.lifecycle
    config = lifecycle.config

    def reread() -> ServerConfig:
        began.set()
        assert may_end.wait(WAIT_S)
        return config

    lifecycle.reread = reread
    with ThreadPoolExecutor(1) as pool:
        reload = pool.submit(client.reload_config)
        assert began.wait(WAIT_S)
        try:
            assert client.drain().is_draining
            assert running.run(lambda: lifecycle.drain(None)).is_draining
            assert health(running) == NOT_SERVING
            assert not client.drain(undo=True).is_draining
            assert not reload.done()
        finally:
            may_end.set()
        assert reload.result(WAIT_S) == []


def test_a_repeated_drain_saves_what_could_not_be_saved(
    client: trocar.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(client, ("fc",))
    events = trainer.watch(trainer.start_fit(samples(), epochs=100_000, batch_size=BATCH))
    next(event for event in events if event.kind == "step")

    async def full(*_: object) -> None:
        raise ServiceError(ErrorReason.STORAGE_FULL, "no space left")

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "write", full)
        client.drain()
    before = [one.number for one in trainer.checkpoints()]
    for _ in range(2):  # the second one has nothing to save
        client.drain()
        saved = trainer.checkpoints()
        assert (len(saved), saved[-1].update_count) == (len(before) + 1, trainer.info().update_count)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ("/trocar_api.v1.ExtractionService/Extract", True),
        ("/trocar_api.v1.ExtractionService/Plan", False),
        ("/trocar_api.v1.StreamService/ExtractStream", True),
        ("/trocar_api.v1.FitService/StartFit", True),
        ("/trocar_api.v1.FitService/WatchFit", False),
        ("/trocar_api.v1.TrainerService/SaveTrainer", False),
        ("/trocar_api.v1.TrainerService/Train", True),
        ("/trocar_api.v1.ServerService/ReloadConfig", False),
        ("/trocar_api.v1.ModelService/LoadModel", True),
        ("/grpc.health.v1.Health/Check", False),
    ],
)
def test_what_is_work_and_what_only_looks_or_leads_out(method: str, expected: bool) -> None:
    assert is_work(method) is expected
    assert method in METHOD_SCOPES or method.startswith("/grpc.health")
