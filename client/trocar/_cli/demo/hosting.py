"""Demo server: checkpoint conversion, config file, start and stop of the process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from trocar._cli.failures import FAILED, fail

MODEL_ID = "efficientnet-lite0"
WEIGHTS_FILE = "efficientnet-lite0.safetensors"
DATA_FOLDER = "server-data"
"""What the server keeps, within the folder of the demo."""

CONFIG = f"""\
# A custom model: a factory that builds it, its weights and its preprocessing.
[models.{MODEL_ID}]
factory = "efficientnet_lite_pytorch:EfficientNet.from_name"
arguments = ["{MODEL_ID}"]
weights = "{WEIGHTS_FILE}"
categories = "torchvision:resnet50"        # the 1,000 ImageNet classes

[models.{MODEL_ID}.preprocessing]
resize = [224]
crop = [224]
interpolation = "bicubic"
mean = [0.498039, 0.498039, 0.498039]      # 127 / 255
std = [0.501961, 0.501961, 0.501961]       # 128 / 255
"""

_READY_TIMEOUT_S = 180.0
_STOP_TIMEOUT_S = 30.0
_POLL_S = 0.05


def convert(checkpoint: Path, target: Path) -> str:
    """Run `trocar admin convert`; return its output.

    Raises:
        typer.Exit: It failed.
    """
    done = subprocess.run(
        trocar_command("admin", "convert", checkpoint, target), capture_output=True, text=True, check=False
    )
    if done.returncode:
        fail(done.stderr.strip().removeprefix("error: "), FAILED)
    return done.stdout.strip()


@contextmanager
def serving(config: Path, folder: Path) -> Iterator[str]:
    """Run `trocar serve` for as long as the context is open; yield its address.

    Its log goes to `folder/server.log`. The process is terminated when the context ends, in any case:
    SIGTERM first, which lets it finish its calls, SIGKILL when that takes too long.

    Raises:
        typer.Exit: The server did not start, or did not stop as it should.
    """
    # A folder of its own: another server on this machine may have the user's.
    environment = {**os.environ, "TROCAR_DATA_DIR": str((folder / DATA_FOLDER).resolve())}
    ready_file, log = folder / "server.ready", folder / "server.log"
    ready_file.unlink(missing_ok=True)
    options = ("--config", config, "--host", "127.0.0.1", "--port", "0", "--ready-file", ready_file)
    with log.open("wb") as log_file, _exit_on_sigterm():
        process = subprocess.Popen(
            trocar_command("serve", *options),
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=log_file,
            env=environment,
        )
        try:
            yield _wait_until_ready(process, ready_file, log)
        finally:
            code = _stop(process)
            ready_file.unlink(missing_ok=True)
    if code:
        fail(f"the server ended with code {code}; its log is {log}", FAILED)


def trocar_command(*arguments: str | Path) -> Sequence[str]:
    """Return the command line of `trocar` in this very environment."""
    return [sys.executable, "-m", "trocar", *map(str, arguments)]


def _wait_until_ready(process: subprocess.Popen[bytes], ready_file: Path, log: Path) -> str:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while not ready_file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            last_lines = log.read_text(errors="replace").strip().splitlines()[-5:]
            fail("\n".join(["the server did not start; the end of its log:", *last_lines]), FAILED)
        time.sleep(_POLL_S)
    return ready_file.read_text()


def _stop(process: subprocess.Popen[bytes]) -> int:
    process.terminate()
    try:
        return process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Unwind the stack on SIGTERM inside the context, so that `finally` runs; the default just ends."""

    def exit_now(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, exit_now)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
