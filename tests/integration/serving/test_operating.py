"""The steps of the operators' guide, done: certificates, tokens, servers, a backup and its restore."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import trocar
from tests.support import ROOT
from tests.support.files.deployment import documents
from tests.support.files.markdown import Block, blocks, table_rows
from tests.support.models.tiny_models import Plain
from tests.support.servers import warm_python
from tests.support.servers.certificates import OPENSSL
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom
from trocar._cli.demo.demo_sources import find_sources
from trocar_api.reasons import ErrorReason
from trocar_server.auth import Scope, TokenFile
from trocar_server.config import Limits, ServerConfig

PAGE = ROOT / "docs" / "operating.md"
GROUP_PAGE = ROOT / "docs" / "tasks" / "for-my-group.md"
START_S = 120

MODELS = {"plain": custom(Plain, (3, 8, 8))}


def section(title: str) -> list[Block]:
    """Return the blocks under a heading."""
    text = PAGE.read_text()
    start = text.index(f"\n## {title}\n") + 1
    end = text.find("\n## ", start)
    first, last = text.count("\n", 0, start), text.count("\n", 0, end if end > 0 else len(text))
    return [block for block in blocks(PAGE) if first < block.line <= last]


def script_lines(block: Block) -> list[str]:
    return [line for line in re.sub(r"\\\n\s*", "", block.text).splitlines() if line.strip()]


class Shell:
    """Does what the page says, line by line, in a folder; servers get a free port of loopback."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = Path(sys.executable).parent
        self._environment = {
            **os.environ,
            "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
            "TROCAR_DATA_DIR": str(folder / "data"),
        }
        self._address = "localhost:50051"
        self._exports: list[str] = []
        self._server: subprocess.Popen[bytes] | None = None

    def write(self, block: Block) -> None:
        """Make the file that a block names in its first line, with weights that need no network."""
        name = block.text.splitlines()[0].removeprefix("# ")
        assert name.endswith(".toml")
        (self.folder / name).write_text(block.text.replace('"DEFAULT"', '"random:0"'))

    def run(self, line: str) -> None:
        """Run one line; a server is left running until the next one, or the end."""
        if line.startswith("trocar serve"):
            self._serve(shlex.split(line))
        elif line.startswith("export "):
            self._exports.append(line)
        else:
            self._check(line.replace("localhost:50051", self._address))

    def stop(self) -> None:
        """Stop the server that runs, as an operator would."""
        if self._server is not None:
            self._server.send_signal(signal.SIGTERM)
            assert self._server.wait(60) == 0
            self._server = None

    def _check(self, line: str) -> None:
        is_refused = line.startswith("! ")
        script = "\n".join(["set -e", *self._exports, line.removeprefix("! ")])
        command = ["bash", "-c", script]
        done = subprocess.run(
            command, cwd=self.folder, env=self._environment, capture_output=True, text=True, check=False
        )
        said = f"{line}\n{done.stdout}{done.stderr}"
        assert (done.returncode == 1) if is_refused else (done.returncode == 0), said

    def _serve(self, words: list[str]) -> None:
        self.stop()
        ready_file = self.folder / "ready"
        ready_file.unlink(missing_ok=True)
        words += ["--host", "127.0.0.1", "--port", "0", "--device", "cpu", "--ready-file", "ready"]
        with (self.folder / "log").open("ab") as log:
            self._server = warm_python.Popen(
                [sys.executable, "-m", *words], cwd=self.folder, env=self._environment, stdout=log, stderr=log
            )
        for _ in range(START_S * 10):
            if ready_file.exists() or self._server.poll() is not None:
                break
            time.sleep(0.1)
        assert ready_file.exists(), (self.folder / "log").read_text()
        self._address = ready_file.read_text().replace("127.0.0.1", "localhost")


@contextmanager
def shell(folder: Path) -> Iterator[Shell]:
    opened = Shell(folder)
    with ExitStack() as stack:
        stack.callback(opened.stop)
        yield opened


@pytest.mark.skipif(OPENSSL is None, reason="needs the openssl command")
def test_others_are_let_in_step_by_step(tmp_path: Path) -> None:
    steps = section("Letting others in")
    assert [block.language for block in steps] == ["sh", "toml", "sh", "sh", "sh", "toml", "sh"]
    with shell(tmp_path) as opened:
        for block in steps:
            if block.language == "toml":
                opened.write(block)
                continue
            for line in script_lines(block):
                opened.run(line)
    assert {grant.name for grant in TokenFile(tmp_path / "data").read()} == {"alice", "ops"}


@pytest.mark.skipif(OPENSSL is None, reason="needs the openssl command")
def test_a_server_for_a_group_is_made_step_by_step(tmp_path: Path) -> None:
    cat, _ = find_sources().photographs
    Image.open(cat).convert("RGB").save(tmp_path / "cat.jpg")
    for name in ("cat", "cup"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        shutil.copy(tmp_path / "cat.jpg", tmp_path / "pets" / name)
    steps = blocks(GROUP_PAGE)
    assert [block.language for block in steps] == ["sh", "toml", "sh", "sh", "sh"]
    with shell(tmp_path) as opened:
        for block in steps:
            if block.language == "toml":
                opened.write(block)
                continue
            for line in script_lines(block):
                opened.run(line)
    assert (tmp_path / "cat.safetensors").is_file()
    assert (tmp_path / "config" / "trocar" / "config.toml").stat().st_mode & 0o077 == 0


@contextmanager
def serving(data_dir: Path) -> Iterator[tuple[RunningServer, trocar.Client]]:
    with (
        running_server(models=MODELS, data_dir=data_dir) as running,
        trocar.connect(running.address) as client,
    ):
        yield running, client


def test_a_backup_brings_back_what_was_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before, after = tmp_path / "before", tmp_path / "after"
    images, labels = np.random.default_rng(0).random((4, 3, 8, 8), np.float32), np.array([0, 1, 2, 3])
    TokenFile(before).add("alice", [Scope.RUN], expires_at_s=None, now_s=time.time())
    with serving(before) as (_, client):
        trainer = client.train("plain", trainable=["fc"])
        update_count = trainer.step(images, labels).update_count
        trainer.save()
        trainer.publish("tuned")
        stored = client.upload_dataset((images, labels))
        client.store_edits("plain", "none-left", [trocar.edit("fc", "zero")])
        expected = client.extract("tuned", images, taps=["fc"])["fc"]
    after.mkdir()
    saving, restoring = (line for block in section("Backup") for line in script_lines(block))
    for line, folder in ((saving, before), (restoring, after)):
        subprocess.run(shlex.split(line.replace("/var/lib/trocar", str(folder))), check=True)
    assert [grant.name for grant in TokenFile(after).read()] == ["alice"]
    with serving(after) as (_, client):
        assert client.trainer(trainer.trainer_id).info().update_count == update_count
        assert [entry.dataset_id for entry in client.datasets()] == [stored.dataset_id]
        assert [entry.name for entry in client.stored_edits("plain")] == ["none-left"]
        assert np.array_equal(client.extract("tuned", images, taps=["fc"])["fc"], expected)


def rows_under(heading: str) -> list[list[str]]:
    text = PAGE.read_text()
    start = text.index(f"\n{heading}\n")
    end = text.find("\n## ", start + 1)
    rows = set(map(tuple, table_rows(PAGE)))
    found = [line for line in text[start:end].splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in found]
    assert {tuple(row) for row in cells} <= rows
    return cells


def test_the_limits_of_the_page_are_limits() -> None:
    named = {
        name
        for row in rows_under("## Limits, and how they belong together")
        for name in re.findall("`(\\w+)`", row[0])
    }
    assert named - {"grace_s"} <= set(Limits.model_fields)
    assert "grace_s" in ServerConfig.model_fields


def test_the_reasons_of_the_page_are_reasons() -> None:
    named = {
        name for row in rows_under("## When something is wrong") for name in re.findall("`([A-Z_]+)`", row[0])
    }
    assert len(named) > 15
    assert named <= set(ErrorReason.__members__)


def test_the_files_of_the_page_are_all_that_there_are() -> None:
    text = PAGE.read_text()
    linked = {(PAGE.parent / link).resolve() for link in re.findall(r"\]\((\.\./[^)#]+)\)", text)}
    assert {path for path in linked if not path.exists()} == set()
    kubernetes = {path.parent for path in (ROOT / "deploy" / "kubernetes").rglob("kustomization.yaml")}
    assert kubernetes <= linked
    assert documents(ROOT / "deploy" / "kubernetes" / "base" / "kustomization.yaml")
