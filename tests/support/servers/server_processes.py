"""Servers in processes of their own, to be killed: torch is imported once, each server is a fork.

with server_processes() as processes:
    server = processes.start(data_dir)
    os.kill(server.pid, signal.SIGKILL)
    assert server.wait() == -signal.SIGKILL
"""

import asyncio
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.servers import warm_python


@dataclass
class ServerProcess:
    """A server that runs, or has ended."""

    pid: int
    address: str
    _processes: "ServerProcesses"

    def kill(self) -> None:
        """Kill it and wait for its end."""
        os.kill(self.pid, signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    def terminate(self) -> int:
        """Ask it to stop; returns its exit code."""
        os.kill(self.pid, signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Wait for its end; returns the exit code, or the negative number of the signal."""
        return int(self._processes.ask({"wait": self.pid})["code"])


class ServerProcesses:
    """Starts servers.

    Args:
        temporary: Where they put temporary files; as usual when None.
        first: Modules that are imported before the first server starts, `package.module`; with
            `package.module:function` the function is called, too, for example to plant a fault.
    """

    def __init__(self, temporary: Path | None = None, first: Sequence[str] = ()) -> None:
        self._process = warm_python.Popen(
            [sys.executable, "-m", "tests.support.servers.server_processes", *first],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ({"TMPDIR": str(temporary)} if temporary else {}),
        )
        self._lock = threading.Lock()

    def start(self, data_dir: Path, **settings: Any) -> ServerProcess:
        """Start a server on a free port; returns when it is ready."""
        found = self.ask({"data_dir": str(data_dir), "device": "cpu", "port": 0, **settings})
        assert "port" in found, found
        return ServerProcess(found["pid"], f"127.0.0.1:{found['port']}", self)

    def killed_while_starting(self, data_dir: Path, after_s: float, **settings: Any) -> bool:
        """Start a server and kill it, at the latest when it is ready; returns whether it was not."""
        found = self.ask(
            {"data_dir": str(data_dir), "device": "cpu", "port": 0, "kill_after_s": after_s, **settings}
        )
        assert self.ask({"wait": found["pid"]})["code"] == -signal.SIGKILL
        return "port" not in found

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one request, and return the answer."""
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._process.stdout.readline())
            return answer

    def close(self) -> None:
        """Kill whatever still runs."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


@contextmanager
def server_processes(temporary: Path | None = None, first: Sequence[str] = ()) -> Iterator[ServerProcesses]:
    """Start servers within the context; none outlives it. See `ServerProcesses`."""
    processes = ServerProcesses(temporary, first)
    try:
        yield processes
    finally:
        processes.close()


def main() -> None:
    """Answer requests from stdin."""
    import trocar_server.app.app  # noqa: F401 - for the forks

    for name in sys.argv[1:]:
        module, _, function = name.partition(":")
        imported = importlib.import_module(module)
        if function:
            getattr(imported, function)()
    setattr(os, "fsync", lambda _: None)  # noqa: B010 - to save the time: no power will be cut
    children: set[int] = set()
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            children.discard(request["wait"])
            _, status = os.waitpid(request["wait"], 0)
            answer: dict[str, Any] = {"code": os.waitstatus_to_exitcode(status)}
        else:
            answer = _start(request)
            children.add(answer["pid"])
        print(json.dumps(answer), flush=True)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _start(settings: dict[str, Any]) -> dict[str, Any]:
    kill_after_s = settings.pop("kill_after_s", None)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            status = _serve(settings, writing)
        finally:
            os._exit(status)
    os.close(writing)
    if kill_after_s is not None:
        select.select([reading], [], [], kill_after_s)
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reading) as said:
        port = said.readline()
    return {"pid": child, "port": int(port)} if port else {"pid": child}


def _serve(settings: dict[str, Any], writing: int) -> int:
    import structlog

    from trocar_server.app import app
    from trocar_server.config import ServerConfig

    log = Path(settings["data_dir"]).with_suffix(".log").open("a")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    structlog.configure(logger_factory=structlog.WriteLoggerFactory(log))

    def ready(running: app.App) -> None:
        os.write(writing, f"{running.rpc.port}\n".encode())
        os.close(writing)

    asyncio.run(app.serve(ServerConfig(**settings), ready))
    log.flush()
    return 0


if __name__ == "__main__":
    main()
