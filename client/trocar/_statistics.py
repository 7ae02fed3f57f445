"""Summary numbers of one feature map."""

from collections.abc import Mapping
from typing import NoReturn, TypeAlias

import numpy as np
from numpy.typing import NDArray

StatisticValue: TypeAlias = float | NDArray[np.float64]
CountValue: TypeAlias = int | NDArray[np.float64]


class Statistics:
    """The statistics that a tap asked for, as attributes. Read-only.

        maps.stats["layer4"].mean            # float
        maps.stats["layer4"].std             # float64 array (channels,) with over="channel"

    Numbers were computed in float64; NaN and Inf propagate as in NumPy. With over="all" each is
    a float (an int for the counts), otherwise a float64 array of shape (channels,) or (samples,).

    Attributes:
        over: What they were taken over: "all", "channel" or "sample".
        channel_dim: The channel dimension used, from 0; None unless over is "channel".
    """

    over: str
    channel_dim: int | None
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

    def __init__(
        self, values: Mapping[str, StatisticValue], *, over: str = "all", channel_dim: int | None = None
    ) -> None:
        self.__dict__.update(values)
        self.__dict__.update(_names=tuple(values), over=over, channel_dim=channel_dim)

    def as_dict(self) -> dict[str, StatisticValue]:
        """Return the requested statistics by name, in the order of the request."""
        return {name: self.__dict__[name] for name in self.__dict__.get("_names", ())}

    def __getattr__(self, name: str) -> NoReturn:
        """Explain what is missing; only called for what is not there."""
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
        return mine.keys() == theirs.keys() and all(
            np.array_equal(mine[name], theirs[name], equal_nan=True) for name in mine
        )

    __hash__ = None  # type: ignore[assignment]  # as for every class with an __eq__ of its own

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={_short(value)}" for name, value in self.as_dict().items())
        return f"Statistics({shown})" if self.over == "all" else f"Statistics({shown}, over={self.over!r})"


def _short(value: StatisticValue) -> str:
    return f"array{value.shape}" if isinstance(value, np.ndarray) else f"{value:.6g}"
