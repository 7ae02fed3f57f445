"""A server as a process: it has its data directory for itself, and listens to signals."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.models.gated_models import WAIT_S
from tests.support.models.odd_models import Identity
from tests.support.servers import warm_python
from tests.support.servers.serving import custom
from trocar_server.app import app
from trocar_server.app.server_id import server_id
from trocar_server.config import ModelConfig, ServerConfig
from trocar_server.storage.data_lock import lock_folder


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
