"""Rows: the samples of one place in float64, whole in memory or read again for each use.

# Note: [Rows in blocks]
A solver reads rows in blocks, and keeps sums of them. Rows of at most `MEMORY_BYTES` are read from the disk
once and are then one block; larger ones are read for each sum, so that memory does not grow with the number
of samples.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Places: TypeAlias = NDArray[np.bool_]

MEMORY_BYTES = 256 << 20
"""The most bytes of rows that are kept in memory."""


@dataclass(frozen=True)
class Rows:
    """Samples, of which some may be left out.

    Attributes:
        read: Yields all samples in order, in blocks.
        sample_count: The number of all samples.
        channel_count: The channels.
        keep: Which samples count.
        shift: Is taken from each channel.
        factor: Multiplies each channel then.
    """

    read: Callable[[], Iterator[Floats]]
    sample_count: int
    channel_count: int
    keep: Places
    shift: Floats
    factor: Floats

    @classmethod
    def of(cls, read: Callable[[], Iterator[Floats]], sample_count: int, channel_count: int) -> "Rows":
        """Return all samples as they are, from memory where they fit."""
        if 8 * sample_count * channel_count <= MEMORY_BYTES:
            pieces = [block[:, :channel_count] for block in read()]
            whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
            read = lambda: iter((whole,))  # noqa: E731 - bound to this array
        keep = np.ones(sample_count, np.bool_)
        return cls(read, sample_count, channel_count, keep, np.zeros(channel_count), np.ones(channel_count))

    @property
    def count(self) -> int:
        """The samples that count."""
        return int(self.keep.sum())

    @cached_property
    def fits_in_memory(self) -> bool:
        """Whether they may be one array."""
        return 8 * self.count * self.channel_count <= MEMORY_BYTES

    def only(self, keep: Places) -> "Rows":
        """Return other samples of the same place."""
        return Rows(self.read, self.sample_count, self.channel_count, keep, self.shift, self.factor)

    def scaled(self, shift: Floats, factor: Floats) -> "Rows":
        """Return the samples, less a shift and times a factor for each channel."""
        return Rows(self.read, self.sample_count, self.channel_count, self.keep, shift, factor)

    def centred(self, mean: Floats) -> "Rows":
        """Return the samples without a mean of what they are now."""
        return self.scaled(self.shift + mean / self.factor, self.factor)

    def held(self) -> "Rows":
        """Return the samples that count as they are now, in memory where they fit."""
        if not self.fits_in_memory:
            return self
        whole = self.array()
        return Rows.of(lambda: iter((whole,)), len(whole), self.channel_count)

    def blocks(self) -> Iterator[tuple[slice, Floats]]:
        """Yield blocks of the samples that count: their places among these, and their values."""
        first = taken = 0
        for block in self.read():
            here = self.keep[first : first + len(block)]
            first += len(block)
            values = block[:, : self.channel_count]
            if not here.all():
                values = values[here]
            if self.shift.any() or (self.factor != 1).any():
                values = (values - self.shift) * self.factor
            if len(values):
                yield slice(taken, taken + len(values)), values
            taken += len(values)

    def array(self) -> Floats:
        """Return the samples that count as one array, (samples, channels)."""
        pieces = [values for _, values in self.blocks()]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def moments(self, weights: Floats) -> tuple[Floats, Floats]:
        """Return the weighted mean of each channel, and its variance (divided by the sum of the weights)."""
        total = weights.sum()
        mean = (
            sum(((weights[at] @ values) for at, values in self.blocks()), np.zeros(self.channel_count))
            / total
        )
        squares = np.zeros(self.channel_count)
        for at, values in self.blocks():
            squares += weights[at] @ np.square(values - mean)
        return mean, squares / total

    def products(self, vectors: Floats) -> Floats:
        """Return the samples times vectors, (samples, vectors), of vectors (vectors, channels)."""
        result = np.empty((self.count, len(vectors)))
        for at, values in self.blocks():
            result[at] = values @ vectors.T
        return result
