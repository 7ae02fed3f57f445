"""Served against local, column "exact" of the targets: `python -m benchmarks.serving`.

Each row alternates local and served passes in rounds, so that a drift of the machine hits both, and prints
the ratio of the medians. Below 1 the remote call is faster than the caller's own PyTorch.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import trocar
from benchmarks.local import Local
from benchmarks.report import Row, print_rows
from benchmarks.served import served

_ROUNDS = 8


@dataclass(frozen=True)
class Case:
    """One row: what is asked of which model, and the target for the ratio."""

    name: str
    model: str
    tap: str
    batch: int
    repeats: int
    target: float | None = None


CASES = [
    Case("batch 1, p50", "resnet18", "layer4", 1, 20, 1.03),
    Case("batch 1, p50", "resnet50", "layer4", 1, 12, 1.03),
    Case("batch 32, layer4", "resnet18", "layer4", 32, 2, 0.70),
    Case("batch 32, layer4", "resnet50", "layer4", 32, 1, 0.50),
    Case("batch 32, layer1", "resnet18", "layer1", 32, 3, 0.75),
    Case("batch 32, layer1", "resnet50", "layer1", 32, 2, 0.75),
]


def measure(client: trocar.Client, local: Local, case: Case) -> list[Row]:
    """Return the rows of one case: p50, and p99 for batch 1."""
    shape = (case.batch, 3, 224, 224)
    batch = np.random.default_rng(0).standard_normal(shape, np.float32)

    def call() -> None:
        client.extract(case.model, batch, [case.tap])

    local.measure(case.model, [case.tap], shape, 3)
    timed(call, 3)
    own: list[float] = []
    ours: list[float] = []
    for _ in range(_ROUNDS):
        own += local.measure(case.model, [case.tap], shape, case.repeats)
        ours += timed(call, case.repeats)
    base = statistics.median(own)
    rows = [
        Row(
            f"{case.model}, {case.name}",
            statistics.median(ours) / base,
            case.target,
            f"local {base * 1e3:.1f} ms",
        )
    ]
    if case.batch == 1:
        p99 = sorted(ours)[int(len(ours) * 0.99)]
        own99 = sorted(own)[int(len(own) * 0.99)]
        rows.append(Row(f"{case.model}, batch 1, p99", p99 / base, 1.5, f"local p99 {own99 / base:.2f}"))
    return rows


def measure_early_stop(client: trocar.Client) -> Row:
    """Compare a pass that stops after `layer1` with one to the end, both served."""
    batch = np.zeros((8, 3, 224, 224), np.float32)
    tap = trocar.tap
    early: list[float] = []
    full: list[float] = []
    for _ in range(_ROUNDS):
        early += timed(
            lambda: client.extract("resnet50", batch, [tap("layer1", stats=["max"], values=False)]), 2
        )
        full += timed(lambda: client.extract("resnet50", batch, ["/out"]), 2)
    return Row(
        "resnet50, early stop at layer1 against full pass", statistics.median(early) / statistics.median(full)
    )


def timed(call: Callable[[], object], repeats: int) -> list[float]:
    """Return the seconds of each call."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds


def main() -> None:
    """Run every case and print the table."""
    models = ["resnet18=random:0", "resnet50=random:0"]
    with served(models) as address, Local() as local, trocar.connect(address) as client:
        rows = [row for case in CASES for row in measure(client, local, case)]
        rows.append(measure_early_stop(client))
    print_rows("Serving, exact: time against local eager", rows)


if __name__ == "__main__":
    main()
