"""Statistics of many batches, merged from the statistics of each.

    table = StatisticsTable(["std"])
    taps = [trocar.tap("layer4", stats=wanted_statistics(["std"]))]
    for images in batches:
        table.add(client.extract("resnet50", images, taps))
    table.values()["layer4"]["std"]

Each number is what it would be over all samples at once, up to rounding; NaN and Inf propagate.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trocar import FeatureMaps, Histogram, Statistics
from trocar._cli.failures import refuse

Values: TypeAlias = NDArray[np.float64]
Number: TypeAlias = float | int | list[float] | list[int]

_COUNTS = ("nan_count", "inf_count", "count")

_MERGE: dict[str, Callable[[Values, Values, float], Values]] = {
    "mean": lambda old, new, share: old * (1 - share) + new * share,
    "min": lambda old, new, share: np.minimum(old, new),
    "max": lambda old, new, share: np.maximum(old, new),
    "absmax": lambda old, new, share: np.maximum(old, new),
    "l2": lambda old, new, share: np.sqrt(old * old + new * new),
    "zero_fraction": lambda old, new, share: old * (1 - share) + new * share,
    "nan_count": lambda old, new, share: old + new,
    "inf_count": lambda old, new, share: old + new,
    "l1": lambda old, new, share: old + new,
    "count": lambda old, new, share: old + new,
}
"""How two numbers about the same group become one; `share` is the part of all elements that is new."""


def wanted_statistics(names: Sequence[str]) -> tuple[str, ...]:
    """Return what to ask the server for: variances are merged with the help of the means."""
    helpers = ("mean", "var") if {"var", "std"} & set(names) else ()
    return tuple(dict.fromkeys((*names, *helpers)))


class StatisticsTable:
    """The statistics of every feature map over all batches.

    Args:
        names: The statistics that `values` returns.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._merged: dict[str, _Merged] = {}

    def add(self, maps: FeatureMaps) -> None:
        """Take what the next batch gave."""
        for name, statistics in maps.stats.items():
            shape = maps.info[name].shape
            count = _elements_per_group(statistics, shape)
            if name in self._merged:
                self._merged[name].add(statistics, count)
                self.shapes[name] = (self.shapes[name][0] + shape[0], *shape[1:]) if shape else ()
            else:
                self._merged[name] = _Merged(statistics, count)
                self.shapes[name] = shape

    def values(self) -> dict[str, dict[str, Number]]:
        """Return each statistic by feature map: a number over all, a list over channels or samples."""
        return {
            feature_map: {name: merged.value(name) for name in self.names}
            for feature_map, merged in self._merged.items()
        }


class _Merged:
    """The statistics of one feature map, so far."""

    def __init__(self, first: Statistics, element_count: int) -> None:
        self._over = first.over
        self._parts = _parts(first)
        self._element_count = element_count

    def add(self, statistics: Statistics, element_count: int) -> None:
        new = _parts(statistics)
        if self._over == "sample":
            self._parts = {name: np.concatenate([old, new[name]]) for name, old in self._parts.items()}
            return
        _check_mergeable(self._parts)
        if self._element_count == 0:
            self._parts = new
        elif element_count:
            share = element_count / (self._element_count + element_count)
            self._parts = _merge(self._parts, new, share)
        self._element_count += element_count

    def value(self, name: str) -> Number:
        values = self._parts[name]
        numbers: list[float] | list[int] = (values.astype(np.int64) if name in _COUNTS else values).tolist()
        return numbers[0] if self._over == "all" else numbers


def _check_mergeable(names: Iterable[str]) -> None:
    for name in names:
        if name not in _MERGE and name not in ("var", "std"):
            refuse(f"--stats: {name} of several batches cannot be merged; raise --batch, so that one has all")


def _parts(statistics: Statistics) -> dict[str, Values]:
    return {
        name: np.atleast_1d(np.float64(value))
        for name, value in statistics.as_dict().items()
        if not isinstance(value, Histogram)
    }


def _merge(old: dict[str, Values], new: dict[str, Values], share: float) -> dict[str, Values]:
    with np.errstate(invalid="ignore", over="ignore"):  # NaN and Inf are answers here
        merged = {name: merge(old[name], new[name], share) for name, merge in _MERGE.items() if name in old}
        if "var" in old:
            # Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983, equation 2.1.
            delta = new["mean"] - old["mean"]
            within = old["var"] * (1 - share) + new["var"] * share
            merged["var"] = within + delta * delta * share * (1 - share)
        if "std" in old:
            merged["std"] = np.sqrt(merged["var"])
    return merged


def _elements_per_group(statistics: Statistics, shape: tuple[int, ...]) -> int:
    if statistics.channel_dim is not None:
        shape = shape[: statistics.channel_dim] + shape[statistics.channel_dim + 1 :]
    return math.prod(shape)
