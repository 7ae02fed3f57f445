"""The same request again, against a local pass: `python -m benchmarks.cache`.

The server keeps replies; the client asks by digest. Rounds alternate with local passes, as in `serving`.
"""

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import trocar
from benchmarks.local import Local
from benchmarks.report import Row, print_rows
from benchmarks.served import served
from benchmarks.serving import timed

_ROUNDS = 8
_CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class Case:
    """One row: what is asked again."""

    name: str
    model: str
    tap: str
    batch: int
    repeats: int
    target: float | None = 0.05


CASES = [
    Case("batch 1, layer4", "resnet18", "layer4", 1, 20),
    Case("batch 1, layer4", "resnet50", "layer4", 1, 12),
    Case("batch 32, layer4", "resnet18", "layer4", 32, 4),
    Case("batch 32, layer1 (26 MB back)", "resnet18", "layer1", 32, 4, None),
]


def measure(address: str, local: Local, case: Case) -> list[Row]:
    """Return the rows of one case: asked by digest, and with the inputs sent each time."""
    shape = (case.batch, 3, 224, 224)
    batch = np.random.default_rng(0).standard_normal(shape, np.float32)
    with trocar.connect(address, cache=True) as asking, trocar.connect(address) as sending:
        ways: dict[str, Callable[[], trocar.FeatureMaps]] = {
            "by digest": lambda: asking.extract(case.model, batch, [case.tap]),
            "inputs sent": lambda: sending.extract(case.model, batch, [case.tap]),
        }
        seconds = _alternating(ways, local, case, shape)
        assert all(call().is_cached for call in ways.values())
    base = statistics.median(seconds["local"])
    return [
        Row(
            f"{case.model}, {case.name}, {way}",
            statistics.median(seconds[way]) / base,
            case.target if way == "by digest" else None,
            f"local {base * 1e3:.1f} ms, median {statistics.median(seconds[way]) * 1e3:.2f} ms",
        )
        for way in ways
    ]


def _alternating(
    ways: dict[str, Callable[[], trocar.FeatureMaps]], local: Local, case: Case, shape: tuple[int, ...]
) -> dict[str, list[float]]:
    local.measure(case.model, [case.tap], shape, 2)
    for call in ways.values():
        timed(call, 3)
    seconds: dict[str, list[float]] = {way: [] for way in ("local", *ways)}
    for _ in range(_ROUNDS):
        seconds["local"] += local.measure(case.model, [case.tap], shape, max(1, case.repeats // 4))
        for way, call in ways.items():
            seconds[way] += timed(call, case.repeats)
    return seconds


def main() -> None:
    """Run every case and print the table."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "trocar.toml"
        config.write_text(f"[limits]\nfeature_cache_bytes = {_CACHE_BYTES}\n")
        models = ["resnet18=random:0", "resnet50=random:0"]
        with served(models, "--config", str(config)) as address, Local() as local:
            rows = [row for case in CASES for row in measure(address, local, case)]
    print_rows("The same request again: time against local eager", rows)


if __name__ == "__main__":
    main()
