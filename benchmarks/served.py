"""A server as a user starts it, `trocar serve` in a process of its own, for the length of a benchmark."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
            process = subprocess.Popen([*command, *options], stderr=log, stdout=log)
        try:
            yield _wait(process, ready)
        finally:
            process.terminate()
            process.wait()


def _wait(process: "subprocess.Popen[bytes]", ready: Path) -> str:
    limit = time.monotonic() + _START_LIMIT_S
    while not ready.exists():
        if process.poll() is not None or time.monotonic() > limit:
            raise RuntimeError("the server did not start")
        time.sleep(0.05)
    return ready.read_text()
