"""Statistics: the closed set of declarations, with their scopes and results."""

from dataclasses import dataclass, field
from enum import StrEnum, unique

import torch

DEFAULT_BIN_COUNT = 64


@unique
class Statistic(StrEnum):
    """A summary of numbers, computed in float64; NaN and Inf propagate as in NumPy.

    Without elements, counts and norms are 0 and everything else is NaN.
    """

    MEAN = "mean"
    """Arithmetic mean."""
    VAR = "var"
    """Population variance, divided by n."""
    STD = "std"
    """Square root of the population variance."""
    MIN = "min"
    """Smallest value; NaN if any element is NaN."""
    MAX = "max"
    """Largest value; NaN if any element is NaN."""
    ABSMAX = "absmax"
    """Largest absolute value; NaN if any element is NaN."""
    L2 = "l2"
    """Euclidean norm."""
    ZERO_FRACTION = "zero_fraction"
    """Share of elements equal to zero, 0 to 1."""
    NAN_COUNT = "nan_count"
    """Number of NaN elements."""
    INF_COUNT = "inf_count"
    """Number of infinite elements, of either sign."""
    L1 = "l1"
    """Sum of absolute values."""
    SKEWNESS = "skewness"
    """Population skewness, m3 / m2**1.5; NaN of equal elements, see `moments`."""
    KURTOSIS = "kurtosis"
    """Population excess kurtosis, m4 / m2**2 - 3; NaN of equal elements, see `moments`."""
    COUNT = "count"
    """Number of elements."""
    QUANTILES = "quantiles"
    """Those of `StatisticParameters.quantiles`, with linear interpolation; NaN if any element is NaN."""
    HISTOGRAM = "histogram"
    """Counts of bins, as `numpy.histogram` with the result's edges; without NaN and elements outside."""
    COVARIANCE = "covariance"
    """Population covariance matrix of the channels, over samples and positions; `Scope.CHANNEL` only."""
    ARGMAX_CHANNEL = "argmax_channel"
    """The channel that holds the largest value, the first of several, or the first NaN; not per channel."""


@unique
class Scope(StrEnum):
    """The elements that one number is taken over."""

    ALL = "all"
    """One number for everything."""
    CHANNEL = "channel"
    """One number per channel, over samples and positions."""
    SAMPLE = "sample"
    """One number per sample, that is per index of dimension 0."""


@dataclass(frozen=True)
class StatisticParameters:
    """Parameters of quantiles and histograms; see `find_problem` for the limits."""

    quantiles: tuple[float, ...] = ()
    """For `Statistic.QUANTILES`: the quantiles, each 0 to 1, in any order."""

    edges: tuple[float, ...] = ()
    """For `Statistic.HISTOGRAM`: the edges of its bins, ascending; chosen from the elements when empty."""

    bin_count: int | None = None
    """For `Statistic.HISTOGRAM` without edges: the most bins. 64 when None."""

    @property
    def most_bins(self) -> int:
        """The most bins of a histogram."""
        return len(self.edges) - 1 if self.edges else (self.bin_count or DEFAULT_BIN_COUNT)


NO_PARAMETERS = StatisticParameters()
"""For statistics without parameters."""


@dataclass(frozen=True)
class StatisticsResult:
    """The statistics of one feature map."""

    scope: Scope
    """Their scope."""

    channel_dim: int | None
    """The channel dimension, from 0; set with `Scope.CHANNEL` only."""

    values: dict[Statistic, list[float]]
    """By statistic, in the order asked for: one number, or one per channel or sample.

    Quantiles and histograms have several for each, concatenated; a covariance has none.
    """

    edges: tuple[float, ...] = ()
    """The edges of the histogram's bins, one more than bins; the same for every channel or sample."""

    rank_error: float = 0.0
    """Bound on the rank error of quantiles, as a share of the elements of each; 0 where exact."""

    covariance: torch.Tensor | None = field(default=None, compare=False)
    """Of shape (channels, channels), float64, exactly symmetric, on the host."""


def default_channel_dim(rank: int) -> int:
    """Return the default channel dimension of a tensor of this rank, from 0.

    The last dimension of rank 3, (batch, tokens, width), otherwise dimension 1, as in
    (batch, channels, height, width) and (batch, features).
    """
    return 2 if rank == 3 else 1
