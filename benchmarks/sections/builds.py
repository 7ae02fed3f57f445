"""Builds: calls while a compiled variant is built, against the same calls just before.

Each round asks with `numerics="fast"` for values that nobody asked for before, which starts a build. It makes
exact calls until the variant is in use: the build process, the compilation in the server and the trial.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np

import trocar
from benchmarks.measuring import Effort, images, timed
from benchmarks.report import Row, Table, row
from benchmarks.served import served

_TAPS = ["layer4.1", "layer4.1.bn2", "layer4.1.conv2", "layer4.1.bn1", "layer4.1.conv1", "layer4.0"]
_CALLS, _TARGET, _LIMIT_S = 60, 1.2, 600.0
_CONFIG = "[engine]\ncompile_after = 1\nmin_gain = 0\n"
_NOTE = (
    "Exact calls from the request of a compiled pass until it is in use, against such calls just before. "
    "Each round is another build; figures are medians of the ratios of all rounds. The client is on the same "
    "cores. On a shared machine single rounds differ by a third."
)


@dataclass(frozen=True)
class Round:
    """Seconds of calls before and during one build, and of the build."""

    before: Sequence[float]
    during: Sequence[float]
    build_s: float

    def ratio(self, of: Callable[[Sequence[float]], float]) -> float:
        """Return a figure of the calls during the build, over that of those before."""
        return of(self.during) / of(self.before)


def run(effort: Effort) -> list[Table]:
    """Measure all rows."""
    rounds = effort.of(len(_TAPS))
    with (
        served(["resnet18=random:0"], config=_CONFIG) as server,
        trocar.connect(server.address, timeout_s=600) as client,
    ):
        alone = [_round(client, tap, 1, effort) for tap in _TAPS[:rounds]]
        # Other taps: these are in use.
        busy = [_round(client, f"{tap}/in", 3, effort) for tap in _TAPS[:rounds]]
    rows = [*_rows("one client", alone), *_rows("three clients", busy)]
    return [Table("While a compiled pass is built", rows, note=_NOTE)]


def _round(client: trocar.Client, tap: str, clients: int, effort: Effort) -> Round:
    inputs = images(1)
    exact = partial(client.extract, "resnet18", inputs, ["fc"])
    fast = partial(client.extract, "resnet18", inputs, [tap], options=trocar.options(numerics="fast"))
    with ThreadPoolExecutor(clients) as threads:

        def calls(count: int) -> list[float]:
            parts = threads.map(lambda _: timed(exact, count // clients), range(clients))
            return [seconds for part in parts for seconds in part]

        before, during = calls(effort.of(_CALLS)), list[float]()
        started = time.perf_counter()
        fast()
        while time.perf_counter() - started < _LIMIT_S:
            during += calls(24)
            if fast().execution.engine != "eager":
                break
    return Round(before, during, time.perf_counter() - started)


def _rows(who: str, rounds: Sequence[Round]) -> Iterator[Row]:
    medians = [result.ratio(statistics.median) for result in rounds]
    spread = f"{len(rounds)} rounds, {min(medians):.2f} to {max(medians):.2f}"
    means = [result.ratio(statistics.fmean) for result in rounds]
    tails = [result.ratio(lambda seconds: float(np.percentile(seconds, 95))) for result in rounds]
    yield row(f"resnet18, batch 1, {who}, p50", statistics.median(medians), _TARGET, spread)
    yield row(f"resnet18, batch 1, {who}, mean", statistics.median(means))
    yield row(f"resnet18, batch 1, {who}, p95", statistics.median(tails))
    seconds = statistics.median(result.build_s for result in rounds)
    yield row(f"resnet18, batch 1, {who}: until it is in use", seconds, unit="s")
