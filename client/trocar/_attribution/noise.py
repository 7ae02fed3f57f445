"""Noisy copies of the inputs, for SmoothGrad (Smilkov et al. 2017)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from trocar._base.tensors import Array


@dataclass(frozen=True)
class NoisyBatches:
    """Batches of noisy copies, (copies x samples, ...); can be iterated again.

    The noise of a copy of a sample depends only on the seed and their positions, not on batches.
    Every batch holds as many copies, so that one list of classes fits all: the last is repeated at the end.
    """

    inputs: Array
    """Of shape (samples, ...)."""
    copies: int
    """How many of each sample."""
    sigma: float
    """Standard deviation of the noise, in the inputs' own units."""
    seed: int
    """Of the noise."""
    first_sample: int
    """The position of the first sample among all."""
    per_batch: int
    """Copies in one batch."""

    def __iter__(self) -> Iterator[Array]:
        for start in range(0, self.copies, self.per_batch):
            chosen = [min(start + k, self.copies - 1) for k in range(self.per_batch)]
            batch = np.stack([self.copy(index) for index in chosen])
            yield batch.reshape(-1, *self.inputs.shape[1:])

    def copy(self, index: int) -> Array:
        """Return one noisy copy of every sample."""
        noise = [
            np.random.default_rng((self.seed, index, self.first_sample + sample)).standard_normal(
                self.inputs.shape[1:], dtype=np.float32
            )
            for sample in range(len(self.inputs))
        ]
        factor = self.inputs.dtype.type(self.sigma)
        noisy: Array = self.inputs + factor * np.stack(noise).astype(self.inputs.dtype)
        return noisy

    def rows(self, values: Array, batch: int) -> Array:
        """Return a batch's values as (copies, samples, ...), without padding."""
        count = min(self.per_batch, self.copies - batch * self.per_batch)
        return values.reshape(self.per_batch, len(self.inputs), *values.shape[1:])[:count]
