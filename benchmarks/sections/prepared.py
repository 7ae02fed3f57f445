"""Prepared calls: the time around a pass, against `extract` over TCP and over a Unix socket, in one run.

One float32 image of 602 KB up, and `layer4` of resnet18 down, 100 KB. Of each call the time of the pass is
subtracted, as the server reports it. All variants take turns, at servers that differ in their address alone.
CPU time and voluntary context switches are those of client and server together, the pass included.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import trocar
from benchmarks.measuring import Effort, images
from benchmarks.report import Figure, Row, Table
from benchmarks.served import served
from trocar._bench.records import quantiles

_ROUNDS, _REPEATS = 30, 10
_MODEL, _TAP = "resnet18=random:0", "layer4"
COLUMNS = ("p50", "p99", "p99 of calls by p99 of passes", "CPU", "switches")
_NOTE = "Time around a pass, which is that of the call without that of the pass."


@dataclass
class Way:
    """A variant, the process of its server, and what was measured."""

    call: Callable[[], trocar.FeatureMaps]
    process_id: int
    took_s: list[float] = field(default_factory=list)
    compute_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    switches: list[float] = field(default_factory=list)

    def measure(self) -> None:
        """Make some calls."""
        cpu_s, switches = usage(self.process_id)
        for _ in range(_REPEATS):
            started = time.perf_counter()
            maps = self.call()
            self.took_s.append(time.perf_counter() - started)
            self.compute_s.append(maps.timing.compute_s)
        after_s, after = usage(self.process_id)
        self.cpu_s.append((after_s - cpu_s) / _REPEATS)
        self.switches.append((after - switches) / _REPEATS)

    def forget(self) -> None:
        """Drop what was measured to warm up."""
        for values in (self.took_s, self.compute_s, self.cpu_s, self.switches):
            values.clear()


def run(effort: Effort) -> list[Table]:
    """Measure all rows."""
    image = images(1)
    with tempfile.TemporaryDirectory() as folder:
        path = f"unix:{Path(folder) / 'trocar.sock'}"
        with (
            served([_MODEL]) as tcp,
            served([_MODEL], "--host", path) as local,
            trocar.connect(tcp.address, timeout_s=600) as remote,
            trocar.connect(local.address, timeout_s=600) as near,
            near.prepare("resnet18", image, [_TAP]) as prepared,
        ):
            ways = {
                "`extract` over TCP": Way(lambda: remote.extract("resnet18", image, [_TAP]), tcp.process_id),
                "`extract` over a Unix socket": Way(
                    lambda: near.extract("resnet18", image, [_TAP]), local.process_id
                ),
                "prepared, on a Unix socket": Way(lambda: prepared(image), local.process_id),
            }
            for index in range(effort.of(_ROUNDS) + 1):
                for way in ways.values():
                    way.measure()
                    if not index:
                        way.forget()
            assert prepared.is_shared, "the server has lent no memory"
    return [Table("Prepared calls", [_row(name, way) for name, way in ways.items()], COLUMNS, _NOTE)]


def usage(process_id: int) -> tuple[float, int]:
    """Return CPU seconds and voluntary context switches of the threads of a process and of this one."""
    nanoseconds = switches = 0
    for process in (process_id, os.getpid()):
        for task in Path(f"/proc/{process}/task").iterdir():
            try:
                schedule, status = (task / "schedstat").read_text(), (task / "status").read_text()
            except OSError:  # the thread has just ended
                continue
            nanoseconds += int(schedule.split()[0])
            switches += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return nanoseconds / 1e9, switches


def _row(name: str, way: Way) -> Row:
    around = [(took - compute) * 1e3 for took, compute in zip(way.took_s, way.compute_s, strict=True)]
    (worst,), (worst_pass,) = quantiles(way.took_s, (0.99,)), quantiles(way.compute_s, (0.99,))
    is_prepared = name.startswith("prepared")
    figures = (
        Figure(statistics.median(around), 0.25 if is_prepared else None, unit="ms"),
        Figure(quantiles(around, (0.99,))[0], unit="ms"),
        Figure(worst / worst_pass, 1.1 if is_prepared else None),
        Figure(statistics.median(way.cpu_s) * 1e3, unit="ms"),
        Figure(statistics.median(way.switches)),
    )
    return Row(name, dict(zip(COLUMNS, figures, strict=True)))
