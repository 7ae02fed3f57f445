"""Measurement: variants timed in turns, so that drift of the machine affects all alike; medians."""

import inspect
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trocar._bench.local_passes import Local, LocalJob


@dataclass(frozen=True)
class Effort:
    """Amount of measurement."""

    is_quick: bool = False
    """Whether only to see that it works: the figures then say little."""

    def of(self, count: int) -> int:
        """Return a number of rounds or repeats; a fifth of it in a quick run."""
        return max(count // 5, 1) if self.is_quick else count


def timed(call: Callable[[], object], repeats: int = 1) -> list[float]:
    """Return the seconds of each call."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return seconds


def in_turns(ways: Mapping[str, Callable[[], Sequence[float]]], rounds: int) -> dict[str, list[float]]:
    """Measure each variant once in every round, after one warm-up round."""
    result: dict[str, list[float]] = {name: [] for name in ways}
    for index in range(rounds + 1):
        for name, way in ways.items():
            seconds = way()
            if index:
                result[name] += seconds
    return result


def ratio(way: Callable[[], object], other: Callable[[], object], rounds: int, repeats: int = 1) -> float:
    """Return the ratio of the median times of two variants, measured in turns."""
    result = in_turns({"way": lambda: timed(way, repeats), "other": lambda: timed(other, repeats)}, rounds)
    return statistics.median(result["way"]) / statistics.median(result["other"])


def local_way(local: Local, job: LocalJob) -> Callable[[], Sequence[float]]:
    """Return a variant that makes local passes."""
    return lambda: local.measure(job)


def images(batch: int, side: int = 224) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    """Return a batch of random numbers that looks like images."""
    return np.random.default_rng(0).standard_normal((batch, 3, side, side), np.float32)


def takes(function: Callable[..., Any], option: str) -> bool:
    """Whether a function has this parameter; some were added in later versions."""
    return option in inspect.signature(function).parameters
