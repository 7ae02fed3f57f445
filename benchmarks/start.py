"""How long it takes until something can be used, and what an idle server holds."""

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.measuring import Effort, timed
from benchmarks.report import Row, Table, row
from benchmarks.served import served

_ROUNDS = 5


def run(effort: Effort) -> list[Table]:
    """Measure all rows."""
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "resnet18.safetensors"
        write_weights(weights)
        rows = [*server_rows(f"resnet18={weights}", effort), import_row(effort), command_row(effort)]
    return [
        Table(
            "Start and idle memory",
            rows,
            note="Medians, in a fresh process each time; files are in the page cache.",
        )
    ]


def write_weights(file: Path) -> None:
    """Write random weights of resnet18 as a file, in a process that ends again."""
    code = (
        "import sys; from torchvision.models import resnet18; from safetensors.torch import save_file; "
        "save_file(resnet18(weights=None).state_dict(), sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, str(file)], check=True)


def server_rows(model: str, effort: Effort) -> list[Row]:
    """Return how long a server takes to be ready, and the memory that it then has."""
    seconds, memory = [], []
    for _ in range(effort.of(_ROUNDS)):
        with served([model]) as server:
            seconds.append(server.ready_s)
            memory.append(server.memory_bytes() / 1e9)
    return [
        row("first ready, resnet18 from a file on disk", median(seconds), 3.0, unit="s"),
        row("memory of an idle server, resnet18", median(memory), 0.8, unit="GB"),
    ]


def import_row(effort: Effort) -> Row:
    """Return how long `import trocar` takes, beside what an empty interpreter does."""
    took = _difference("import trocar", effort)
    return row("`import trocar`", took, 0.3, unit="s", note="without the interpreter's own start")


def command_row(effort: Effort) -> Row:
    """Return how long the command line takes to say its version."""
    took = _difference("from trocar._cli import main; main(['--version'])", effort)
    return row("`trocar --version`", took, unit="s")


def _difference(code: str, effort: Effort) -> float:
    run_code = partial(subprocess.run, check=False, stdout=subprocess.DEVNULL)
    rounds = effort.of(_ROUNDS) + 1
    full = timed(partial(run_code, [sys.executable, "-c", code]), rounds)[1:]
    empty = timed(partial(run_code, [sys.executable, "-c", "pass"]), rounds)[1:]
    return median(full) - median(empty)
