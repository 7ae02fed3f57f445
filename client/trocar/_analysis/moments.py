"""Moments: mean and covariance of channels, from the running statistics of a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trocar._request.statistic_options import StatisticName
    from trocar._result.feature_maps import FeatureMapInfo
    from trocar._result.statistics import Statistics

Floats = NDArray[np.float64]

MOMENT_STATISTICS: tuple[StatisticName, ...] = ("mean", "covariance", "count")
"""What has to be asked for."""


@dataclass(frozen=True, eq=False)
class Moments:
    """Of vectors of channels."""

    mean: Floats
    """Of shape (channels,)."""
    covariance: Floats
    """Sample covariance (divided by n - 1), of shape (channels, channels)."""
    count: int
    """How many vectors there were."""
    channel_dim: int | None = None
    """The dimension of the channels in the values, from 0; None where it is not known."""


def moments(
    statistics: Mapping[str, Statistics], info: Mapping[str, FeatureMapInfo], at: str, inputs: str
) -> Moments:
    """Compute the moments of the one feature map of a stream.

    Args:
        statistics: The running statistics of all batches, by feature map.
        info: Metadata of the feature maps, by name.
        at: The selector, for messages.
        inputs: Name of the inputs, for messages.

    Raises:
        ValueError: There is not exactly one feature map, there are fewer than 2 vectors, or they hold NaN
            or infinities.
    """
    result = [name for name in statistics if name in info] or list(statistics)
    if len(result) != 1:
        raise ValueError(f"{at!r} selects {len(result)} feature maps; select one: {', '.join(result)}")
    (name,) = result
    chosen = statistics[name]
    mean = np.asarray(chosen.mean, np.float64)
    population = np.asarray(chosen.covariance, np.float64)
    count = int(np.max(chosen.count))
    if count < 2:
        raise ValueError(f"{inputs}: a covariance needs at least 2 samples, received {count}")
    if not (np.isfinite(mean).all() and np.isfinite(population).all()):
        raise ValueError(
            f"{inputs}: the features at {at!r} contain NaN or infinity; dead_channels shows the channels"
        )
    return Moments(mean, population * (count / (count - 1)), count, chosen.channel_dim)
