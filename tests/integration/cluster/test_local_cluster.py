"""`trocar serve --ray local`, and the commands that look at it, scale it and stop it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import trocar
from tests.support.servers.ray_cluster import command, write_config
from tests.support.servers.waiting import wait_until
from trocar_server.auth import Scope, TokenFile

pytest.importorskip("ray", reason="needs Ray: pip install 'trocar[ray]'")
pytestmark = pytest.mark.timeout(600)

MODELS = {"tiny": {"architecture": "squeezenet1_1", "weights": "random:0"}}
READY = "trocar is ready on "


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of Ray's own."""
    path = Path(tempfile.mkdtemp(prefix="ray-"))  # short, for the names of sockets
    monkeypatch.setenv("RAY_TMPDIR", str(path))
    monkeypatch.setenv("HOME", str(path))  # of Ray's token
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)  # of simulated nodes, see `set_up_ray`
    yield path
    shutil.rmtree(path)


@contextmanager
def serving(folder: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Serve a model, and yield the process with the address of Ray once a client has been answered.

    It ends within the context; then nothing is left of it, and it has printed no error.
    """
    config = write_config(folder / "cluster.toml", MODELS, {"tiny": "cpus = 0.5"}, start_timeout_s=400)
    token = TokenFile(folder / "data").add("ann", {Scope.RUN}, expires_at_s=None, now_s=0)[1]
    line = [sys.executable, "-m", "trocar", "serve", "--ray", "local", "--config", str(config)]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = next(text for text in process.stdout if text.startswith(READY))
            address = ready.removeprefix(READY).partition(" ")[0]
            with trocar.connect(address, token=str(token)) as client:
                images = np.zeros((1, 3, 64, 64), np.float32)
                assert client.extract("tiny", images, ["classifier"])["classifier"].shape[:2] == (1, 1000)
            yield process, ready.rpartition(" ")[2].rstrip(")\n")
            process.wait(60)
        except BaseException:
            process.send_signal(signal.SIGINT)
            raise
        _, errors = process.communicate()
    logged = [text for text in errors.splitlines() if not text.startswith("event=starting ")]
    assert (process.returncode, logged) == (0, [])
    wait_until(lambda: not any(is_of(path, folder) for path in Path("/proc").glob("[0-9]*/environ")))


def test_a_local_cluster_is_scaled_and_stopped_by_commands(folder: Path) -> None:
    with serving(folder) as (_, ray_address):
        check_commands(ray_address)


def test_ctrl_c_ends_a_local_cluster_that_serves(folder: Path) -> None:
    with serving(folder) as (process, _):
        process.send_signal(signal.SIGINT)


def test_a_second_cluster_is_refused_a_folder_until_the_first_one_was_killed(folder: Path) -> None:
    config = write_config(folder / "cluster.toml", MODELS, {"tiny": "cpus = 0.5"}, start_timeout_s=400)
    for _ in range(2):
        line = [sys.executable, "-m", "trocar", "serve", "--ray", "local", "--config", str(config)]
        with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert any(text.startswith(READY) for text in process.stdout)
                told = check_refused(command(*line[3:]), f"uses '{folder / 'data'}'")
                assert "since" in told
                assert "trocar cluster stop --ray" in told
                examined = command("doctor", "--config", str(config)).stdout
                assert f"uses '{folder / 'data'}'" in examined, examined
            finally:
                kill_all(folder)
    assert command("doctor", "--config", str(config)).stdout.count("no cluster uses the data directory") == 1


def kill_all(folder: Path) -> None:
    """Kill every process of the cluster in this folder with SIGKILL."""
    while own := [path for path in Path("/proc").glob("[0-9]*/environ") if is_of(path, folder)]:
        for path in own:
            with suppress(ProcessLookupError):
                os.kill(int(path.parent.name), signal.SIGKILL)


def is_of(environ: Path, folder: Path) -> bool:
    """Whether a process is of the cluster in this folder."""
    try:
        return f"RAY_TMPDIR={folder}\0".encode() in environ.read_bytes()
    except OSError:  # it has ended
        return False


def check_commands(ray_address: str) -> None:
    """Scale, look at and stop what runs; each wrong word is one line."""

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        return command("cluster", *words, "--ray", ray_address)

    for words, message in (
        (("scale", "other", "1"), "no model 'other'; deployed: tiny"),
        (("scale", "tiny", "0"), "0 to 0 replicas: at least 1"),
        (("scale", "tiny", "3", "2"), "3 to 2 replicas: at least 1, and the first the smaller"),
    ):
        check_refused(run(*words), message)
    check_refused(command("cluster", "status", "--ray", "local"), "use --ray auto while it runs")
    scaled = run("scale", "tiny", "2", "3")
    assert (scaled.returncode, scaled.stdout) == (0, "tiny has at least 2 and at most 3 replicas\n")
    state = json.loads(run("status", "--json").stdout)
    assert [replica["is_draining"] for replica in state["replicas"]] == [False, False]
    stopped = run("stop")
    assert (stopped.returncode, stopped.stdout) == (0, "stopped\n")


def check_refused(ended: "subprocess.CompletedProcess[str]", message: str) -> str:
    told = [text for text in ended.stderr.splitlines() if not text.startswith("event=starting ")]
    assert (ended.returncode, len(told)) == (1, 1), ended.stderr
    assert message in ended.stderr
    return ended.stderr
