"""Statistics of one feature map."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trocar._base.tables import html_table, number_text

_MOST_VALUES = 8
"""Values of one statistic that a notebook shows as they are."""


@dataclass(frozen=True, eq=False)
class Histogram:
    """Number of elements in each bin. Read-only.

        plt.stairs(histogram.counts, histogram.edges)

    Bins are half-open, and the last one includes its right edge, as in `numpy.histogram`. NaN and elements
    outside are not counted.
    """

    counts: NDArray[np.int64]
    """Of shape (bins,), or (channels, bins) or (samples, bins)."""
    edges: NDArray[np.float64]
    """Of shape (bins + 1,), ascending; the same for every channel or sample."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Histogram):
            return NotImplemented
        return np.array_equal(self.counts, other.counts) and np.array_equal(self.edges, other.edges)

    __hash__ = None  # type: ignore[assignment]  # as for every class with an __eq__ of its own

    def __repr__(self) -> str:
        first, last = self.edges[0], self.edges[-1]
        return f"Histogram(counts=array{self.counts.shape}, edges={first:.6g} to {last:.6g})"


StatisticValue: TypeAlias = float | NDArray[np.float64]
CountValue: TypeAlias = int | NDArray[np.float64]
AnyStatistic: TypeAlias = StatisticValue | Histogram


class Statistics:
    """The requested statistics of a tap, as attributes. Read-only.

        maps.stats["layer4"].mean            # float
        maps.stats["layer4"].std             # float64 array (channels,) with over="channel"

    Numbers are computed in float64; NaN and Inf propagate as in NumPy. With over="all" each is a float (an
    int for the counts), otherwise a float64 array of shape (channels,) or (samples,). Quantiles have one more
    dimension, a histogram is an object with `counts` and `edges`.

    Args:
        values: The statistics by name.
        over: Grouping of the statistics.
        channel_dim: The channel dimension used.
        rank_error: Bound of the error of the quantiles' ranks.
        covariance: The covariance matrix of the channels.

    Attributes:
        over: Grouping of the statistics: "all", "channel" or "sample".
        channel_dim: The channel dimension used, from 0; None unless over is "channel".
        rank_error: Bound of the error of the quantiles' ranks, as a share of the elements of each; 0.0 if
            they are exact.
    """

    over: str
    channel_dim: int | None
    rank_error: float
    mean: StatisticValue
    """Arithmetic mean."""
    var: StatisticValue
    """Population variance (divided by n)."""
    std: StatisticValue
    """Square root of the population variance."""
    min: StatisticValue
    """Smallest value."""
    max: StatisticValue
    """Largest value."""
    absmax: StatisticValue
    """Largest absolute value."""
    l2: StatisticValue
    """Euclidean norm."""
    zero_fraction: StatisticValue
    """Share of elements equal to zero, 0 to 1."""
    nan_count: CountValue
    """Number of NaN elements."""
    inf_count: CountValue
    """Number of infinite elements, of either sign."""
    l1: StatisticValue
    """Sum of absolute values."""
    skewness: StatisticValue
    """Population skewness, m3 / m2**1.5; NaN of equal elements."""
    kurtosis: StatisticValue
    """Population excess kurtosis, m4 / m2**2 - 3; NaN of equal elements."""
    quantiles: NDArray[np.float64]
    """In the order asked for: float64 array (quantiles,), or (channels or samples, quantiles)."""
    histogram: Histogram
    """Counts of bins, and the bins' edges."""
    covariance: NDArray[np.float64]
    """Population covariance of the channels, over samples and positions: (channels, channels)."""
    argmax_channel: CountValue
    """The channel that holds the largest value, the first of several; NaN of no elements."""
    count: CountValue
    """Number of elements."""

    def __init__(
        self,
        values: Mapping[str, AnyStatistic],
        *,
        over: str = "all",
        channel_dim: int | None = None,
        rank_error: float = 0.0,
        covariance: NDArray[np.float64] | None = None,
    ) -> None:
        known = dict(values) if covariance is None else {**values, "covariance": covariance}
        self.__dict__.update(known)
        self.__dict__.update(_names=tuple(known), over=over, channel_dim=channel_dim, rank_error=rank_error)

    def as_dict(self) -> dict[str, AnyStatistic]:
        """Return the requested statistics by name, in the order of the request."""
        return {name: self.__dict__[name] for name in self.__dict__.get("_names", ())}

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame: a row for each channel or sample, or one; a column for each number.

        Histograms are left out; they have `counts` and `edges`.

        Raises:
            ValueError: There are no other statistics, or a covariance has more than 16,384 columns.
            MissingExtraError: pandas is missing: pip install "trocar[pandas]".
        """
        from trocar._result.feature_tables import statistics_table

        return statistics_table(self.over, self.as_dict()).to_pandas()

    def __getattr__(self, name: str) -> NoReturn:
        """Raise an error with an explanation; only called for missing attributes."""
        requested = ", ".join(self.__dict__.get("_names", ())) or "none"
        raise AttributeError(
            f"no statistic {name!r} here; requested: {requested}; ask for it with tap(..., stats=[...])"
        )

    def __setattr__(self, name: str, value: object) -> NoReturn:
        """Refuse changes."""
        raise AttributeError("statistics are read-only")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Statistics):
            return NotImplemented
        mine, theirs = self.as_dict(), other.as_dict()
        return mine.keys() == theirs.keys() and all(_are_equal(mine[name], theirs[name]) for name in mine)

    __hash__ = None  # type: ignore[assignment]  # as for every class with an __eq__ of its own

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={_short(value)}" for name, value in self.as_dict().items())
        return f"Statistics({shown})" if self.over == "all" else f"Statistics({shown}, over={self.over!r})"

    def _repr_html_(self) -> str:
        """Show a row for each statistic in a notebook; of many values their shape and range."""
        rows = [(name, _range(value)) for name, value in self.as_dict().items()]
        return html_table(("statistic", f"over {self.over}"), rows)


def _are_equal(mine: AnyStatistic, theirs: AnyStatistic) -> bool:
    if isinstance(mine, Histogram) or isinstance(theirs, Histogram):
        return mine == theirs
    return np.array_equal(mine, theirs, equal_nan=True)


def _range(value: AnyStatistic) -> str:
    if isinstance(value, Histogram):
        ends = " to ".join(map(number_text, value.edges[[0, -1]]))
        return f"{len(value.edges) - 1} bins from {ends}, {np.sum(value.counts):,} inside"
    if not isinstance(value, np.ndarray):
        return f"{value:,}" if isinstance(value, int) else number_text(value)
    if value.size <= _MOST_VALUES:
        return ", ".join(map(number_text, value.ravel()))
    return f"{value.shape}: {number_text(value.min())} to {number_text(value.max())}"


def _short(value: AnyStatistic) -> str:
    if isinstance(value, Histogram):
        return f"{len(value.edges) - 1} bins"
    return f"array{value.shape}" if isinstance(value, np.ndarray) else f"{value:.6g}"
