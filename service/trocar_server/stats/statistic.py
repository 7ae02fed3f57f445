"""The words of this package: which statistics there are, what they are taken over, what comes out."""

from dataclasses import dataclass
from enum import StrEnum, unique


@unique
class Statistic(StrEnum):
    """A summary number, computed in float64; NaN and Inf propagate as in NumPy.

    Of no elements, counts and `L2` are 0 and everything else is NaN.
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


@unique
class Scope(StrEnum):
    """What a statistic is taken over."""

    ALL = "all"
    """One number for everything."""
    CHANNEL = "channel"
    """One number per channel, over samples and positions."""
    SAMPLE = "sample"
    """One number per sample, that is per index of dimension 0."""


@dataclass(frozen=True)
class StatisticsResult:
    """The statistics of one feature map."""

    scope: Scope
    """What they were taken over."""

    channel_dim: int | None
    """The dimension that held the channels, from 0; set with `Scope.CHANNEL` only."""

    values: dict[Statistic, list[float]]
    """By statistic, in the order asked for: one number, or one per channel or sample."""


def default_channel_dim(rank: int) -> int:
    """Return where the channels of a tensor of this rank usually are, counted from 0.

    The last dimension of rank 3, (batch, tokens, width), otherwise dimension 1, as in
    (batch, channels, height, width) and (batch, features).
    """
    return 2 if rank == 3 else 1
