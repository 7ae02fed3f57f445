"""A server as a user starts it, `trocar serve` in a process of its own, for the length of a benchmark."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_START_LIMIT_S = 300


@contextmanager
def served(models: Sequence[str], *options: str) -> Iterator[str]:
    """Yield the address of a server that hosts `models`; stop it afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        ready = Path(folder) / "ready"
        command = [
            sys.executable,
            "-m",
            "trocar",
            "serve",
            *models,
            "--port",
            "0",
            "--ready-file",
            str(ready),
        ]
        with (Path(folder) / "log").open("w") as log:
            environment = {**os.environ, "TROCAR_DATA_DIR": str(Path(folder) / "data")}
            process = subprocess.Popen([*command, *options], stderr=log, stdout=log, env=environment)
        try:
            yield _wait(process, ready)
        finally:
            process.terminate()
            process.wait()


def server_process_id() -> int:
    """Return the process id of the server that this process has started."""
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError, IndexError):
                command = (folder / "cmdline").read_bytes().split(b"\0")
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == os.getpid() and b"serve" in command:
                    return int(folder.name)
    raise RuntimeError("there is no server")


def _wait(process: "subprocess.Popen[bytes]", ready: Path) -> str:
    limit = time.monotonic() + _START_LIMIT_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > limit:
            raise RuntimeError("the server did not start")
        time.sleep(0.05)
    return ready.read_text()
