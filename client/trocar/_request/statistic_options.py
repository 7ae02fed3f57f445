"""Statistics with options: quantiles and histograms."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, TypeAlias

from trocar._base.delegation import explained

MAX_QUANTILES = 1024
MAX_BINS = 65_536
DEFAULT_BINS = 64


@dataclass(frozen=True)
class QuantilesWanted:
    """Requested quantiles; made by `quantiles`."""

    shares: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Each 0 to 1, in any order."""

    name = "quantiles"
    """The statistic."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.shares) <= MAX_QUANTILES:
            raise ValueError(f"{len(self.shares)} quantiles are given; 1 to {MAX_QUANTILES} are allowed")
        wrong = [share for share in self.shares if not 0.0 <= share <= 1.0]
        if wrong:
            raise ValueError(f"the quantile {wrong[0]} is not between 0 and 1")


@dataclass(frozen=True)
class HistogramWanted:
    """Bins of a histogram; made by `histogram`."""

    edges: tuple[float, ...] = ()
    """Ascending; chosen by the server when empty."""

    bins: int | None = None
    """Without edges: the most bins."""

    name = "histogram"
    """The statistic."""

    def __post_init__(self) -> None:
        if self.edges and self.bins is not None:
            raise ValueError("a histogram has edges or a number of bins; give one of them")
        if self.bins is not None and not 1 <= self.bins <= MAX_BINS:
            raise ValueError(f"{self.bins} bins are given; 1 to {MAX_BINS} are allowed")
        if self.edges and not 2 <= len(self.edges) <= MAX_BINS + 1:
            raise ValueError(f"{len(self.edges)} edges are given; 2 to {MAX_BINS + 1} are allowed")
        if not all(map(math.isfinite, self.edges)) or any(a >= b for a, b in pairwise(self.edges)):
            raise ValueError("edges must be finite and ascend")


StatisticName: TypeAlias = Literal[
    "mean",
    "var",
    "std",
    "min",
    "max",
    "absmax",
    "l1",
    "l2",
    "zero_fraction",
    "nan_count",
    "inf_count",
    "skewness",
    "kurtosis",
    "count",
    "argmax_channel",
    "covariance",
    "quantiles",
    "histogram",
]
"""The names of statistics, for type checkers."""

Stat: TypeAlias = StatisticName | QuantilesWanted | HistogramWanted
"""One statistic that a tap may ask for."""


@explained
def quantiles(*shares: float) -> QuantilesWanted:
    """Request these quantiles in `stats` of a tap.

        trocar.tap("layer4", stats=["mean", trocar.quantiles(0.05, 0.5, 0.95)])

    Values between two elements are interpolated, as in `numpy.quantile`. Quantiles are exact for up to
    4,194,304 elements over all channels, and per sample always for samples of up to that size; beyond it
    `Statistics.rank_error` bounds the error of their ranks.

    Args:
        *shares: 1 to 1,024 numbers, each from 0 to 1, in any order.

    Raises:
        ValueError: One is not between 0 and 1, or there are none or too many.
    """
    return QuantilesWanted(tuple(map(float, shares)))


@explained
def histogram(edges: Iterable[float] | None = None, *, bins: int | None = None) -> HistogramWanted:
    """Request a histogram in `stats` of a tap.

        trocar.tap("layer4", stats=[trocar.histogram(bins=32)], over="channel")
        trocar.tap("layer4", stats=[trocar.histogram(edges=[0.0, 0.5, 1.0, 2.0])])

    Args:
        edges: The edges of the bins, ascending; 2 to 65,537 of them. Elements outside are not counted.
        bins: Without edges: the maximum number of bins, 1 to 65,536, by default 64. Their edges are multiples
            of a power of two and cover the finite values. If one bin has values on both sides of zero, each
            of its edges is such a multiple.

    Raises:
        TypeError: The edges are no list of numbers.
        ValueError: Both are given, or edges that do not ascend, or too few or many.
    """
    if isinstance(edges, int | float):
        raise TypeError(f"edges is {edges!r}; give a list of numbers, or bins={edges!r} for their number")
    chosen = () if edges is None else tuple(map(float, edges))
    if edges is not None and not chosen:
        raise ValueError("no edges are given; leave them out to have them chosen automatically")
    return HistogramWanted(chosen, bins)
