"""Prepared calls: the time around a pass, against `extract` over TCP and over a Unix socket, in one run.

One float32 image of 602 KB up, and `layer4` of resnet18 down, 100 KB. Of each call the time of the pass is
subtracted, as the server reports it. All variants take turns, call by call, at two servers that are equal but
for their address.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import trocar
from benchmarks.measuring import Effort, images
from benchmarks.report import Figure, Row, Table
from benchmarks.served import served
from trocar._bench.records import quantiles

_CALLS = 300
_WARM = 10
_MODEL, _TAP = "resnet18=random:0", "layer4"
COLUMNS = ("p50", "p99", "p99 of the call by p99 of the pass")
_NOTE = "Milliseconds around a pass of resnet18, which are those of the call without those of the pass."


def run(effort: Effort) -> list[Table]:
    """Measure all rows."""
    image = images(1)
    with tempfile.TemporaryDirectory() as folder:
        path = f"unix:{Path(folder) / 'trocar.sock'}"
        with (
            served([_MODEL]) as tcp,
            served([_MODEL], "--host", path) as local,
            trocar.connect(tcp.address) as remote,
            trocar.connect(local.address) as near,
            near.prepare("resnet18", image, [_TAP]) as prepared,
        ):
            ways: dict[str, Callable[[], trocar.FeatureMaps]] = {
                "`extract` over TCP": lambda: remote.extract("resnet18", image, [_TAP]),
                "`extract` over a Unix socket": lambda: near.extract("resnet18", image, [_TAP]),
                "prepared, on a Unix socket": lambda: prepared(image),
            }
            found = measure(ways, effort.of(_CALLS))
            assert prepared.is_shared, "the server has lent no memory"
    return [Table("Prepared calls", [_row(name, times) for name, times in found.items()], COLUMNS, _NOTE)]


def measure(
    ways: dict[str, Callable[[], trocar.FeatureMaps]], count: int
) -> dict[str, list[tuple[float, float]]]:
    """Return seconds of each call and of its pass, by variant."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for index in range(count + _WARM):
        for name, way in ways.items():
            started = time.perf_counter()
            maps = way()
            took = time.perf_counter() - started
            if index >= _WARM:
                found[name].append((took, maps.timing.compute_s))
    return found


def _row(name: str, times: list[tuple[float, float]]) -> Row:
    around = [(took - compute) * 1e3 for took, compute in times]
    (worst,), (worst_pass,) = (quantiles(seconds, (0.99,)) for seconds in zip(*times, strict=True))
    is_prepared = name.startswith("prepared")
    figures = (
        Figure(statistics.median(around), 0.25 if is_prepared else None, unit="ms"),
        Figure(quantiles(around, (0.99,))[0], unit="ms"),
        Figure(worst / worst_pass, 1.1 if is_prepared else None),
    )
    return Row(name, dict(zip(COLUMNS, figures, strict=True)))
