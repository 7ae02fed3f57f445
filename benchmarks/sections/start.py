"""Start-up: time until first use, and the resources of an idle server.

From the start of `trocar serve`, in a fresh process each time, until it reports that it is ready.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.measuring import Effort
from benchmarks.report import Row, Table, row
from benchmarks.served import served

_ROUNDS = 5
_SETTLE_S = 2
_TIMED = "import time; t = time.perf_counter(); {}; print(time.perf_counter() - t)"


def run(effort: Effort) -> list[Table]:
    """Measure all rows."""
    rounds = effort.of(_ROUNDS)
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "resnet18.safetensors"
        write_weights(weights)
        with served([f"resnet18={weights}"]):  # it may write bytecode
            pass
        rows = [*server_rows(weights, rounds)]
    for statement, target in (("import trocar", 0.3), ("from trocar._cli import main", None)):
        seconds = [import_s(statement) for _ in range(rounds + 1)][1:]  # the first one may write bytecode
        rows.append(row(f"`{statement}`", median(seconds), target, unit="s"))
    return [Table("Start and idle memory", rows, note="Medians, in a fresh process each time.")]


def write_weights(file: Path) -> None:
    """Write random weights of resnet18 as a file, in a process that ends again."""
    code = (
        "import sys; from torchvision.models import resnet18; from safetensors.torch import save_file; "
        "save_file(resnet18(weights=None).state_dict(), sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(file)], check=True)


def server_rows(weights: Path, rounds: int) -> list[Row]:
    """Return a server's time until it is ready, and its memory then."""
    warm, cold, memory = [], [], []
    for _ in range(rounds):
        with served([f"resnet18={weights}"]) as server:
            warm.append(server.ready_s)
            time.sleep(_SETTLE_S)  # for its background work: the memory is that of an idle server
            memory.append(server.memory_bytes() / 1e9)
        forget(weights)
        with served([f"resnet18={weights}"]) as server:
            cold.append(server.ready_s)
    return [
        row("first ready, resnet18, weights on disk", median(warm), 3.0, unit="s"),
        row("first ready, weights not in the page cache", median(cold), 3.0, unit="s"),
        row("memory of the idle server, resnet18", median(memory), 0.8, unit="GB"),
    ]


def forget(file: Path) -> None:
    """Ask the kernel to drop a file from its page cache."""
    with file.open("rb") as opened:
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def import_s(statement: str) -> float:
    """Return the seconds that an import takes in a fresh process."""
    return float(subprocess.check_output([sys.executable, "-c", _TIMED.format(statement)]))
