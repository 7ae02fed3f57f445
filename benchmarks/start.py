"""How long until a server answers, and what it takes: `python -m benchmarks.start [MODEL]`.

From the start of the process `trocar serve` to health SERVING, with the weights on disk; medians of `ROUNDS`.
"Without cached files" means that Linux was asked to drop the weights from its page cache, not torch itself.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torchvision.models import get_model, get_model_weights

from benchmarks.report import Row, print_rows
from trocar_server.models.downloads import stored_path
from trocar_server.models.weights_file import write_weights

ROUNDS = 5
_LIMIT_S = 120.0
_SERVING = health_pb2.HealthCheckResponse.SERVING


def main(model: str = "resnet18") -> None:
    """Print the rows."""
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder)
        weights = _store(model, data_dir)
        warm = [_start(model, data_dir) for _ in range(ROUNDS)]
        cold = []
        for _ in range(ROUNDS):
            _forget(weights)
            cold.append(_start(model, data_dir))
    imports = [_import_s() for _ in range(ROUNDS)]
    print_rows(
        f"Start, {model}, seconds and GB",
        [
            Row("first ready, s", _median([seconds for seconds, _ in warm]), 3.0),
            Row(
                "first ready, weights not in the page cache, s",
                _median([seconds for seconds, _ in cold]),
                3.0,
            ),
            Row("memory of the idle server, GB", _median([memory for _, memory in warm]), 0.8),
            Row("`import trocar`, s", _median(imports), 0.3),
        ],
    )


def _store(model: str, data_dir: Path) -> Path:
    """Write random weights as if they were torchvision's, which need no network."""
    path = stored_path(get_model_weights(model).DEFAULT, data_dir)
    path.parent.mkdir(parents=True)
    write_weights(get_model(model, weights=None).state_dict(), path)
    return path


def _start(model: str, data_dir: Path) -> tuple[float, float]:
    """Return the seconds until health says SERVING, and the server's memory in GB."""
    address = f"unix:{data_dir / 'socket'}"
    environment = {**os.environ, "TROCAR_DATA_DIR": str(data_dir)}
    command = [sys.executable, "-m", "trocar", "serve", model, "--host", address]
    started = time.perf_counter()
    with (data_dir / "log").open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        _wait(address, process)
        seconds = time.perf_counter() - started
        time.sleep(2)  # for the warm-up to end: the memory is that of an idle server
        return seconds, _resident_gb(process.pid)
    finally:
        process.terminate()
        process.wait()


def _wait(address: str, process: "subprocess.Popen[bytes]") -> None:
    limit = time.monotonic() + _LIMIT_S
    path = Path(address.removeprefix("unix:"))
    while not path.exists():
        if process.poll() is not None or time.monotonic() > limit:
            raise RuntimeError("the server did not start")
        time.sleep(0.005)
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)  # its types lack Watch
        watching = stub.Watch(health_pb2.HealthCheckRequest(), timeout=_LIMIT_S, wait_for_ready=True)
        next(reply for reply in watching if reply.status == _SERVING)
        watching.cancel()


def _resident_gb(process_id: int) -> float:
    pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e9


def _import_s() -> float:
    code = "import time; t = time.perf_counter(); import trocar; print(time.perf_counter() - t)"
    return float(subprocess.check_output([sys.executable, "-c", code]))


def _forget(path: Path) -> None:
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)


if __name__ == "__main__":
    main(*sys.argv[1:2])
