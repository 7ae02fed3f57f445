"""Benchmark server: `trocar serve` as a user starts it, in its own process, for one benchmark."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trocar._transport.channel import ConnectOptions

_START_LIMIT_S, _STOP_LIMIT_S = 600, 30
_TIMEOUT_S = 600.0
_SETTLED_S, _SAME_BYTES = 3.0, 1 << 18


@dataclass(frozen=True)
class Server:
    """A running server."""

    address: str
    """Where it listens."""
    process_id: int
    """Its process."""
    ready_s: float
    """Seconds from its start until it was ready."""

    @property
    def options(self) -> ConnectOptions:
        """Options of a client of this server."""
        return ConnectOptions(self.address, _TIMEOUT_S, None, None, 0)

    def memory_bytes(self, kind: str = "VmRSS") -> int:
        """Return its memory: `VmRSS` for now, `VmHWM` for the most so far."""
        return memory_bytes(self.process_id, kind)

    def settled_memory_bytes(self) -> int:
        """Return its memory once that stays the same: first calls import code on another thread."""
        now = self.memory_bytes()
        since = time.monotonic()
        while time.monotonic() < since + _SETTLED_S:
            time.sleep(0.1)
            before, now = now, self.memory_bytes()
            if abs(now - before) > _SAME_BYTES:
                since = time.monotonic()
        return now


@contextmanager
def served(models: Sequence[str], *options: str, config: str = "") -> Iterator[Server]:
    """Yield a server that hosts `models`; stop it afterwards.

    Args:
        models: Names, each with optional weights.
        options: Of `trocar serve`.
        config: The text of a configuration file; none when empty.
    """
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        command = [sys.executable, "-m", "trocar", "serve", *models, "--ready-file", str(ready), *options]
        if "--host" not in options:
            command += ["--port", "0"]
        if config:
            file = Path(folder) / "server.toml"
            file.write_text(config)
            command += ["--config", str(file)]
        environment = {"TROCAR_DATA_DIR": str(Path(folder) / "data")}
        with running(command, Path(folder) / "log", environment) as process:
            started = time.perf_counter()
            wait_for(process, ready.exists)
            yield Server(ready.read_text(), process.pid, time.perf_counter() - started)


@contextmanager
def running(
    command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run a command until the context ends; its output goes to a file.

    It is terminated with all its child processes: some servers leave theirs behind.
    """
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            stderr=file,
            stdout=file,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_LIMIT_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for(process: "subprocess.Popen[bytes]", is_ready: Callable[[], bool]) -> None:
    """Wait until a server is ready.

    Raises:
        RuntimeError: It ended, or took too long.
    """
    limit = time.monotonic() + _START_LIMIT_S
    while not is_ready():
        if process.poll() is not None or time.monotonic() > limit:
            raise RuntimeError("the server did not start")
        time.sleep(0.01)


def memory_bytes(process_id: int, kind: str = "VmRSS") -> int:
    """Return a process's memory, as the kernel reports it."""
    lines = Path(f"/proc/{process_id}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{kind}:"))
