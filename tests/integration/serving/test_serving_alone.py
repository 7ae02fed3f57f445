"""A server as a process: it has its data directory for itself, and listens to signals."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import trocar
from tests.support.models.gated_models import WAIT_S
from tests.support.models.odd_models import Identity
from tests.support.oracles.tiny_training import MODELS as TINY
from tests.support.oracles.tiny_training import samples
from tests.support.servers import warm_python
from tests.support.servers.serving import custom
from trocar_server.app import app
from trocar_server.app.server_id import server_id
from trocar_server.config import ModelConfig, ServerConfig
from trocar_server.storage.data_lock import lock_folder
from trocar_server.training.fit.fitting import Fits
from trocar_server.training.trainer import Trainer


@pytest.mark.parametrize("is_option", [False, True])
def test_a_second_server_on_a_data_directory_ends_and_names_the_first(
    tmp_path: Path, is_option: bool
) -> None:
    lock = lock_folder(tmp_path / "trainers")
    command = [sys.executable, "-m", "trocar_server", "--port", "0", "--device", "cpu"]
    command += ["--data-dir", str(tmp_path)] if is_option else []
    environment = {**os.environ, "TROCAR_DATA_DIR": str(tmp_path / "none" if is_option else tmp_path)}
    done = warm_python.run(command, env=environment, capture_output=True, timeout=WAIT_S, check=False)
    said = done.stderr.decode()
    lock.release()
    assert done.returncode == 1
    assert f"another server (process {os.getpid()})" in said
    assert "data_dir" in said
    assert "Traceback" not in said


async def test_a_hangup_reads_the_configuration_again_and_goes_on_where_it_is_wrong(tmp_path: Path) -> None:
    loop, asked = asyncio.get_running_loop(), asyncio.Semaphore(0)
    identity = {"a": ModelConfig(**custom(Identity))}
    config = ServerConfig(port=0, device="cpu", data_dir=tmp_path, models=identity)
    answers = [
        config.model_copy(update={"port": 1}),  # refused
        config.model_copy(update={"models": {**identity, "b": identity["a"]}}),
    ]
    running: list[app.App] = []

    def reread() -> ServerConfig:
        loop.call_soon_threadsafe(asked.release)
        return answers.pop(0)

    task = asyncio.create_task(app.serve(config, running.append, reread))
    async with asyncio.timeout(WAIT_S):
        while not running:  # noqa: ASYNC110 - a list that is filled on this loop
            await asyncio.sleep(0)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
            await asked.acquire()
        while running[0].lifecycle.config is config:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        assert [entry.spec.model_id for entry in running[0].engine.catalogue.entries()] == ["a", "b"]
        os.kill(os.getpid(), signal.SIGTERM)
        await task


class Slow(nn.Module):
    """A model that is built when `allowed` is set."""

    allowed, asked = threading.Event(), threading.Event()

    def __init__(self) -> None:
        super().__init__()
        self.asked.set()
        assert self.allowed.wait(WAIT_S)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


@pytest.fixture
def slow() -> Iterator[ModelConfig]:
    """A model that waits; a hangup that nobody takes does not end the tests."""
    Slow.allowed.clear()
    Slow.asked.clear()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield ModelConfig(**custom(Slow))
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_a_server_that_loads_its_models(
    tmp_path: Path, slow: ModelConfig, number: int
) -> None:
    running: list[app.App] = []
    before = set(threading.enumerate())  # of servers of other tests
    config = ServerConfig(port=0, device="cpu", data_dir=tmp_path, models={"a": slow, "b": slow})
    task = asyncio.create_task(app.serve(config, running.append))
    async with asyncio.timeout(WAIT_S):
        await asyncio.to_thread(Slow.asked.wait, WAIT_S)
        os.kill(os.getpid(), number)
        Slow.allowed.set()
        await task
    assert running == []  # it was never ready
    lock_folder(tmp_path / "trainers").release()
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("torch-")]


async def test_a_fit_survives_a_signal_while_it_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal comes when one fit runs again and the next one is not resumed yet."""
    config = ServerConfig(port=0, device="cpu", data_dir=tmp_path, models=TINY)
    trainers = await fitted(config)
    resume = Fits.resume

    async def interrupted(fits: Fits, trainer: Trainer) -> None:
        await resume(fits, trainer)
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()

    running: list[app.App] = []
    with monkeypatch.context() as patched:
        patched.setattr(Fits, "resume", interrupted)
        async with asyncio.timeout(WAIT_S):
            await app.serve(config, running.append)
    assert running == []
    restarted = await app.start(config)
    async with trocar.aio.connect(restarted.rpc.address) as client:
        states = [(await (await client.trainer(trainer_id)).info()).state for trainer_id in trainers]
    await restarted.stop()
    assert states == ["fitting", "fitting"]


async def fitted(config: ServerConfig) -> list[str]:
    """Start two fits that last, and stop their server."""
    running = await app.start(config)
    async with trocar.aio.connect(running.rpc.address) as client:
        trainers = [await client.train("tiny", optimizer=trocar.training.sgd(lr=0.05)) for _ in range(2)]
        for trainer in trainers:
            await trainer.start_fit(samples(8), epochs=100_000, batch_size=4)
    await running.stop()
    return [trainer.trainer_id for trainer in trainers]


async def test_a_hangup_while_models_load_reads_the_configuration_when_they_are(
    tmp_path: Path, slow: ModelConfig
) -> None:
    config = ServerConfig(port=0, device="cpu", data_dir=tmp_path, models={"a": slow})
    new = config.model_copy(update={"models": {"a": slow, "b": ModelConfig(**custom(Identity))}})
    running: list[app.App] = []
    task = asyncio.create_task(app.serve(config, running.append, lambda: new))
    async with asyncio.timeout(WAIT_S):
        await asyncio.to_thread(Slow.asked.wait, WAIT_S)
        os.kill(os.getpid(), signal.SIGHUP)
        Slow.allowed.set()
        while not running or running[0].lifecycle.config is config:  # noqa: ASYNC110 - filled on this loop
            await asyncio.sleep(0)
        assert [entry.spec.model_id for entry in running[0].engine.catalogue.entries()] == ["a", "b"]
        os.kill(os.getpid(), signal.SIGTERM)
        await task


SERVE_SLOWLY = """
import asyncio, sys
from tests.integration.serving.test_serving_alone import Slow, custom
from trocar_server.app import app
from trocar_server.config import ModelConfig, ServerConfig
models = {"slow": ModelConfig(**custom(Slow))}
config = ServerConfig(port=0, data_dir=sys.argv[1], device="cpu", models=models)
Slow.asked.set = lambda: print("asked", flush=True)
asyncio.run(app.serve(config, lambda running: None))
"""


def test_a_second_signal_ends_at_once_a_server_whose_model_takes_long(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVE_SLOWLY, str(tmp_path)]
    with warm_python.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout)
        assert any(line == "asked\n" for line in lines)
        process.send_signal(signal.SIGTERM)
        assert any("stopping" in line for line in lines)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S / 2) == 128 + signal.SIGTERM


async def test_a_server_that_runs_empty_stops_like_any_other(tmp_path: Path) -> None:
    running: list[app.App] = []
    config = ServerConfig(port=0, device="cpu", data_dir=tmp_path)
    task = asyncio.create_task(app.serve(config, running.append))
    async with asyncio.timeout(WAIT_S):
        while not running:  # noqa: ASYNC110 - a list that is filled on this loop
            await asyncio.sleep(0)
        state = await running[0].lifecycle.drain(True)
        assert state.is_draining
        os.kill(os.getpid(), signal.SIGTERM)
        await task
    lock_folder(tmp_path / "trainers").release()  # nobody has it any more


def test_the_id_of_a_data_directory_stays(tmp_path: Path) -> None:
    first = server_id(tmp_path / "data").value
    assert server_id(tmp_path / "data").value == first
    assert server_id(tmp_path / "other").value != first
    (tmp_path / "data" / "server.id").write_text(f"{first}\n")  # as earlier versions wrote it
    assert server_id(tmp_path / "data").value == first
    (tmp_path / "data" / "server.id").write_text("damaged")
    assert len(server_id(tmp_path / "data").value) == 32


def test_a_data_directory_that_cannot_be_written_has_an_id_of_the_process(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert len(server_id(file / "data").value) == 32
