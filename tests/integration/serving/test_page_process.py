"""`trocar serve --page`: a process of the page beside the server, which lives and ends with it."""

import asyncio
import http.client
import json
import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import trocar
from tests.support.oracles.tiny_training import MODELS, make_trainer, samples
from tests.support.servers import warm_python
from tests.support.servers.certificates import OPENSSL, authority, signed
from tests.support.servers.grpc_web import get, web_call
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.waiting import wait_until
from trocar_api.v1 import model_pb2
from trocar_server.app.page_process import PageProcess
from trocar_server.auth import Scope, TokenFile

LIST = "trocar_api.v1.ModelService/ListModels"
UNAUTHENTICATED = 16
WAIT_S = 120.0
needs_openssl = pytest.mark.skipif(OPENSSL is None, reason="needs the openssl command to make certificates")


class Serving:
    """A server in a process, with its page."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self.process, self._log = process, log
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert "trocar is ready on" in ready, self._log.read_text()
        self.url = process.stdout.readline().removeprefix("the page is on ").strip()

    def lines(self, event: str) -> list[dict[str, object]]:
        """Lines of the log, as far as they are written."""
        parts = self._log.read_text().split("\n")[:-1]
        return [line for line in map(json.loads, parts) if line["event"] == event]

    def page_pid(self) -> int:
        """The process that the server started for the page."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        (found,) = [int(child) for child in children if b"page" in command_of(int(child)).split(b"\0")]
        return found


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@contextmanager
def serving(folder: Path, *words: str, config: str = "") -> Iterator[Serving]:
    (folder / "data").mkdir(exist_ok=True)
    (folder / "server.toml").write_text(config)
    command = ["serve", "squeezenet1_1=random:0", "--config", "server.toml", "--data-dir", "data"]
    fixed = ["--port", "0", "--device", "cpu", "--log-format", "json"]
    with (folder / "log").open("w") as log:
        process = warm_python.Popen(
            [sys.executable, "-m", "trocar", *command, *fixed, *words],
            cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True,
            env={**os.environ, "TMPDIR": str(folder)},
        )  # fmt: skip
    try:
        yield Serving(process, folder / "log")
    finally:
        process.kill()
        process.wait(WAIT_S)
        assert process.stdout is not None
        process.stdout.close()


def refusal(folder: Path, *words: str, config: str = "", **environment: str) -> str:
    """Start a server that refuses to; return what it says."""
    (folder / "server.toml").write_text(config)
    fixed = ["serve", "--config", "server.toml", "--data-dir", "data", "--port", "0", "--device", "cpu"]
    run = subprocess.run if environment else warm_python.run  # what an interpreter reads as it starts
    done = run(
        [sys.executable, "-m", "trocar", *fixed, *words],
        cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=WAIT_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    return done.stderr.splitlines()[-1]


def listed(url: str, **headers: str) -> list[str]:
    (message,) = web_call(url, LIST, b"", **headers).messages
    return [model.model_id for model in model_pb2.ListModelsResponse.FromString(message).models]


def test_the_page_ends_with_the_server(tmp_path: Path) -> None:
    with serving(tmp_path, "--page-port", "0") as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert [line["url"] for line in server.lines("page")] == [server.url]
        assert get(server.url)[0] == 200
        assert listed(server.url) == ["squeezenet1_1"]
        pid = server.page_pid()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WAIT_S) == 0
        assert not is_running(pid)
    assert list(tmp_path.glob("trocar-*")) == []


def test_the_page_ends_with_a_server_that_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path, "--page-port", "0") as server:
        pid = server.page_pid()
        server.process.kill()
        wait_until(lambda: not is_running(pid))
    with pytest.raises(ConnectionRefusedError):
        get(server.url)
    left = set(tmp_path.glob("trocar-*"))
    with serving(tmp_path, "--page-port", "0"):  # the next server removes what is left
        assert not left & set(tmp_path.glob("trocar-*"))


def test_a_page_that_is_killed_is_back_under_its_address(tmp_path: Path) -> None:
    with serving(tmp_path, "--page-port", "0") as server:
        os.kill(server.page_pid(), signal.SIGKILL)
        wait_until(lambda: len(server.lines("page")) == 2)
        assert [line["url"] for line in server.lines("page")] == [server.url, server.url]
        assert len(server.lines("page ended")) == 1
        assert listed(server.url) == ["squeezenet1_1"]


@needs_openssl
def test_a_guarded_server_and_a_page_with_tls(tmp_path: Path) -> None:
    now_s = time.time()
    _, token = TokenFile(tmp_path / "data").add("full", Scope, expires_at_s=int(now_s) + 3600, now_s=now_s)
    ca = authority(tmp_path)
    signed(ca, tmp_path, "server", names="DNS:server.example")  # the page needs no name of the server
    signed(ca, tmp_path, "page")
    config = """
        [server]
        tokens = true
        tls_cert = "server.pem"
        tls_key = "server.key"
        [page]
        enabled = true
        port = 0
        tls_cert = "page.pem"
        tls_key = "page.key"
    """
    with serving(tmp_path, config=config) as server:
        assert server.url.startswith("https://127.0.0.1:")
        address = urlsplit(server.url)
        trust = ssl.create_default_context(cafile=str(ca.certificate))
        connection = http.client.HTTPSConnection(address.netloc, timeout=WAIT_S, context=trust)
        connection.request("GET", "/", headers={"origin": f"https://{address.netloc}"})
        assert connection.getresponse().status == 200
        connection.close()
        assert https_code(address.netloc, trust) == UNAUTHENTICATED
        assert https_code(address.netloc, trust, authorization=f"Bearer {token}") == 0


def https_code(place: str, trust: ssl.SSLContext, **headers: str) -> int:
    """Status of a call over HTTPS."""
    connection = http.client.HTTPSConnection(place, timeout=WAIT_S, context=trust)
    sent = {"content-type": "application/grpc-web+proto", "origin": f"https://{place}", **headers}
    connection.request("POST", f"/{LIST}", b"\0\0\0\0\0", sent)
    body = connection.getresponse().read()
    connection.close()
    return int(body.rpartition(b"grpc-status: ")[2].split(b"\r\n")[0])


class TestRefusals:
    """What cannot work is said before any model is loaded."""

    def test_an_address_of_others_without_tls(self, tmp_path: Path) -> None:
        said = refusal(tmp_path, "--page", config='[page]\nhost = "192.0.2.1"\n')
        assert "would receive tokens in plain text: set tls_cert and tls_key in [page]" in said

    def test_a_certificate_without_a_key(self, tmp_path: Path) -> None:
        assert "both tls_cert and tls_key" in refusal(tmp_path, "--page", config='[page]\ntls_cert = "c.pem"')

    def test_a_certificate_that_is_missing(self, tmp_path: Path) -> None:
        config = '[page]\nport = 0\ntls_cert = "c.pem"\ntls_key = "k.pem"'
        assert "the page cannot use" in refusal(tmp_path, "--page", config=config)

    def test_a_server_of_client_certificates(self, tmp_path: Path) -> None:
        said = refusal(tmp_path, "--page", config='[server]\ntls_client_ca = "ca.pem"\n')
        assert "a browser has none" in said

    def test_a_port_in_use(self, tmp_path: Path) -> None:
        with serving(tmp_path, "--page-port", "0") as server:
            port = str(urlsplit(server.url).port)
            (tmp_path / "other").mkdir()
            assert "in use" in refusal(tmp_path / "other", "--page-port", port)

    def test_a_missing_extra(self, tmp_path: Path) -> None:
        """Without Hypercorn: the tests' own Python, whose import of it fails."""
        (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['hypercorn'] = None\n")
        path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
        said = refusal(tmp_path, "--page", PYTHONPATH=path)
        assert 'the page needs hypercorn: pip install "trocar[page]"' in said


class Refusal:
    """Stands in for a coroutine function: the machine has no room for another process."""

    def __init__(self) -> None:
        self.was_asked = threading.Event()

    async def __call__(self, *words: object, **options: object) -> None:
        self.was_asked.set()
        raise BlockingIOError(11, "Resource temporarily unavailable")


@contextmanager
def paged(folder: Path) -> Iterator[tuple[RunningServer, PageProcess]]:
    """Start a server in this process, with a page."""
    settings: dict[str, Any] = {"device": "cpu", "data_dir": folder, "page": {"enabled": True, "port": 0}}
    with running_server(models=MODELS, **settings) as server:
        assert server.app.page is not None
        yield server, server.app.page


def kill_page(page: PageProcess) -> None:
    assert page.pid is not None
    os.kill(page.pid, signal.SIGKILL)


def test_a_page_comes_back_once_the_machine_has_room_for_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with paged(tmp_path) as (_, page):
        before, refusal = page.pid, Refusal()
        with monkeypatch.context() as patched:
            patched.setattr(asyncio, "create_subprocess_exec", refusal)
            kill_page(page)
            assert refusal.was_asked.wait(WAIT_S)
        wait_until(lambda: page.pid not in (None, before))


def test_a_stop_saves_trainers_though_the_page_could_not_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusal = Refusal()
    with paged(tmp_path) as (server, page):
        with trocar.connect(server.address) as client:
            trainer = make_trainer(client)
            trainer.step(*samples(4))
        monkeypatch.setattr(page, "_start", refusal)  # a failure that ends its supervision
        kill_page(page)
        assert refusal.was_asked.wait(WAIT_S)
    assert list(tmp_path.glob(f"trainers/{trainer.trainer_id}/checkpoint-*"))
