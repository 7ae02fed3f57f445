"""Warm call: the Python calls, functions and files of ours that it touches, both ends together."""

import json
import subprocess
import sys
from typing import Any

from benchmarks.measuring import Effort
from benchmarks.report import Figure, Row, Table

_TARGETS = {"extract": (200, 120, 30), "training step": (200, 130, 30)}
_COLUMNS = ("calls", "functions", "files")
_NOTE = (
    "Counted by `python tools/warm_calls.py`: a call that was made before, client and server in one process."
)


def run(_: Effort) -> list[Table]:
    """Count in a separate process: a profile hook slows everything."""
    command = [sys.executable, "tools/warm_calls.py", "--json"]
    counted: dict[str, Any] = json.loads(subprocess.check_output(command, text=True))
    rows = [Row(name, _figures(touched, _TARGETS[name])) for name, touched in counted.items()]
    return [Table("What a warm call touches", rows, _COLUMNS, _NOTE)]


def _figures(touched: dict[str, Any], targets: tuple[int, ...]) -> dict[str, Figure]:
    counts = (touched["calls"], touched["functions"], len(touched["files"]))
    return {
        column: Figure(float(count), target)
        for column, count, target in zip(_COLUMNS, counts, targets, strict=True)
    }
