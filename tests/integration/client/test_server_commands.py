"""Commands of the server under `trocar`: failures as text, and as JSON with `--json`."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import trocar
from tests.support.servers import warm_python
from trocar._cli.app import main


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """Run `trocar` with these words and return its exit code, stdout and the last line of stderr."""
    monkeypatch.setenv("TROCAR_DATA_DIR", str(tmp_path / "data"))

    def call(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stopped:
            main([str(word) for word in words])
        shown = capfd.readouterr()
        return int(stopped.value.code or 0), shown.out, shown.err.strip().splitlines()[-1]

    return call


def test_a_server_that_is_ready_prints_its_address_and_failed_models_as_json(tmp_path: Path) -> None:
    words = ("serve", "resnet19=random:0", "resnet18=random:0", "--port", "0", "--device", "cpu", "--json")
    process = warm_python.Popen(
        [sys.executable, "-m", "trocar", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "TROCAR_DATA_DIR": str(tmp_path)},
    )
    try:
        assert process.stdout is not None
        ready = json.loads(process.stdout.readline())
        with trocar.connect(ready["address"]) as client:
            assert client.model("resnet18").state == "loaded"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert ready["metrics"] is None
    assert "resnet19" in ready["failed_models"]["resnet19"]


@pytest.mark.parametrize(
    ("words", "code", "reason", "message"),
    [
        (("admin", "token", "revoke", "nobody"), 1, "INVALID_ARGUMENT", "trocar admin token list"),
        (("admin", "token", "list", "--config", "{folder}/none.toml"), 1, "INVALID_ARGUMENT", "none.toml"),
        (("admin", "token", "create", "alice", "--scope", "root"), 2, None, "root"),
        (("admin", "token", "create", "alice", "--scope", "run", "--expires", "soon"), 2, None, "30d"),
        (("doctor", "--adress", "gpu1"), 2, None, "--adress"),
        (("serve", "--config", "{folder}/missing.toml"), 1, "INVALID_ARGUMENT", "missing.toml"),
        (("serve", "resnet18", "timm:resnet18"), 1, "MODEL_INVALID", "write other=timm:resnet18"),
        (("serve", "--port", "many"), 2, None, "--port"),
        (("admin", "convert", "{folder}/a.pth", "{folder}/b.safetensors"), 2, None, "a.pth"),
    ],
)
def test_failures_of_server_commands_are_json_with_json(
    run: Any,
    tmp_path: Path,
    words: tuple[str, ...],
    code: int,
    reason: str | None,
    message: str,
) -> None:
    filled = [word.format(folder=tmp_path) for word in words]
    stopped, out, line = run(*filled, "--json")
    error = json.loads(line)["error"]
    assert (stopped, out) == (code, "")
    assert (error["reason"], error["exit_code"]) == (reason, code)
    assert message in error["message"]


def test_a_server_that_cannot_listen_says_so_as_json(taken_port: int, tmp_path: Path) -> None:
    words = ("serve", "--port", str(taken_port), "--device", "cpu", "--json")
    done = warm_python.run(
        [sys.executable, "-m", "trocar", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TROCAR_DATA_DIR": str(tmp_path)},
    )
    error = json.loads(done.stderr.splitlines()[-1])["error"]
    assert (done.returncode, done.stdout, error["reason"]) == (1, "", "INVALID_ARGUMENT")
    assert str(taken_port) in error["message"]


def test_failures_of_server_commands_are_a_line_of_text_without_json(run: Any) -> None:
    code, out, line = run("admin", "token", "revoke", "nobody")
    assert (code, out) == (1, "")
    assert line.startswith("error: ")
    assert "trocar admin token list" in line
