"""Running top-k of channels over batches of samples; memory is channels times k numbers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trocar._analysis.moments import Floats
from trocar._base.tensors import Array

_NOTHING = -1


class ChannelTop:
    """The k samples with the largest value of each channel; of equal values the first sample.

        top = ChannelTop(k=9)
        for values, positions in batches:    # (samples, channels) each
            top.add(values, positions)

    NaN is no value: such samples are left out for the channel and counted.

    Args:
        k: How many samples for each channel.

    Attributes:
        values: Of shape (channels, k), largest first; -inf where there are fewer samples.
        samples: The samples' places in the data set, -1 where there are fewer.
        positions: Where the values are, as `add` received it.
        count: How many samples there were.
        nan_count: Values that were NaN, by channel.
    """

    def __init__(self, k: int) -> None:
        self._k = k
        self.count = 0
        self.values: Floats = np.empty((0, 0))
        self.samples: NDArray[np.int64] = np.empty((0, 0), np.int64)
        self.positions: NDArray[np.int64] = np.empty((0, 0), np.int64)
        self.nan_count: NDArray[np.int64] = np.empty(0, np.int64)

    def add(self, values: Array, positions: NDArray[np.int64] | None = None) -> None:
        """Compare the next samples.

        Args:
            values: Of shape (samples, channels).
            positions: Of the same shape; zeros when None.

        Raises:
            ValueError: The number of channels differs from earlier batches, or there is no order.
        """
        if values.ndim != 2 or values.dtype.kind not in "fiub":
            raise ValueError(f"values of shape {values.shape}, {values.dtype}, are no numbers of channels")
        channels = values.shape[1]
        if not self.count:
            self._begin(channels)
        if channels != len(self.values):
            raise ValueError(f"{len(self.values)} channels in one batch and {channels} in another")
        new = values.T.astype(np.float64)
        is_nan = np.isnan(new)
        self.nan_count += is_nan.sum(axis=1)
        numbers = np.arange(self.count, self.count + len(values), dtype=np.int64)
        numbers = np.where(is_nan, _NOTHING, numbers[None])
        places = np.zeros(new.shape, np.int64) if positions is None else positions.T
        self.count += len(values)
        self._merge(np.where(is_nan, -np.inf, new), numbers, places)

    def _begin(self, channels: int) -> None:
        self.values = np.full((channels, self._k), -np.inf)
        self.samples = np.full((channels, self._k), _NOTHING, np.int64)
        self.positions = np.zeros((channels, self._k), np.int64)
        self.nan_count = np.zeros(channels, np.int64)

    def _merge(self, values: Floats, samples: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        all_values = np.concatenate([self.values, values], axis=1)
        all_samples = np.concatenate([self.samples, samples], axis=1)
        all_positions = np.concatenate([self.positions, positions], axis=1)
        # Stable: earlier samples stand before later ones. A sample of -inf stands before no sample at all.
        order = np.lexsort((all_samples == _NOTHING, -all_values), axis=1)[:, : self._k]
        self.values = np.take_along_axis(all_values, order, 1)
        self.samples = np.take_along_axis(all_samples, order, 1)
        self.positions = np.take_along_axis(all_positions, order, 1)
