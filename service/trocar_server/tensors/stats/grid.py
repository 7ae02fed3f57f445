"""Adaptive histogram bins that still merge: their edges are multiples of a power of two.

# Note: [Mergeable grids]
Bin `index` of exponent `e` is [index * 2**e, (index + 1) * 2**e). The bins of `e + 1` are pairs of these,
so counts can always be made coarser without the elements. The exponent is the smallest with which the bins
from the smallest to the largest element are not too many. It can only grow with more elements, so batches,
which start with their own, end at the exponent of all elements together.

All of this is exact in float64: scaling by a power of two does not round. No element is at the right edge
of the last bin, so that NumPy's rule for that edge makes no difference.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

LOWEST_EXPONENT = -1000
HIGHEST_EXPONENT = 1024
_MANTISSA_BITS = 53
_LARGEST = float(np.finfo(np.float64).max)


@dataclass(frozen=True)
class Grid:
    """A row of bins."""

    exponent: int
    """Each bin is 2**exponent wide."""

    first: int
    """The left edge of the first bin, in widths."""

    width: int
    """Number of bins."""

    def coarser(self, exponent: int) -> "Grid":
        """Return the bins of a larger exponent that cover these."""
        shift = exponent - self.exponent
        first, last = self.first >> shift, (self.first + self.width - 1) >> shift
        return Grid(exponent, first, last - first + 1)

    def union(self, other: "Grid", most_bins: int) -> "Grid":
        """Return at most `most_bins` (at least 2) bins that cover both, as fine as possible."""
        exponent = max(self.exponent, other.exponent)
        while True:
            left, right = self.coarser(exponent), other.coarser(exponent)
            first = min(left.first, right.first)
            width = max(left.first + left.width, right.first + right.width) - first
            if width <= most_bins:
                return Grid(exponent, first, width)
            exponent += 1

    def edges(self) -> tuple[float, ...]:
        """Return the edges, width + 1; those beyond float64 are its largest number."""
        with np.errstate(over="ignore"):
            edges = np.ldexp(
                np.arange(self.first, self.first + self.width + 1, dtype=np.float64), self.exponent
            )
        return tuple(edges.clip(-_LARGEST, _LARGEST).tolist())

    def locate(self, elements: torch.Tensor) -> torch.Tensor:
        """Return the position of each finite float64 element among the bins, float64."""
        index = torch.floor(elements * math.ldexp(1.0, -self.exponent))
        index -= ((elements < 0) & (index == 0)).to(torch.float64)  # underflowed to 0, but still negative
        return index - self.first

    def moved(self, counts: torch.Tensor, target: "Grid") -> torch.Tensor:
        """Return counts of shape (groups, width) of these bins as counts of coarser ones that cover them."""
        shift = min(target.exponent - self.exponent, 63)
        index = torch.arange(self.first, self.first + self.width, device=counts.device)
        index = (index >> shift) - target.first
        return counts.new_zeros(len(counts), target.width).index_add_(1, index, counts)


def fit(low: float, high: float, most_bins: int) -> Grid:
    """Return at most `most_bins` (at least 2) bins from `low` to `high`, as fine as possible.

    But not finer than the float spacing at the largest element.
    """
    magnitudes = [math.frexp(end)[1] for end in (low, high) if end != 0.0]
    finest = max([LOWEST_EXPONENT, *(magnitude - _MANTISSA_BITS for magnitude in magnitudes)])
    start = _grid_of(low, finest).union(_grid_of(high, finest), 1 << 62)
    excess = (start.width - 1) // most_bins  # a first guess, so that the search does not begin at the finest
    guess = start.coarser(finest + max(excess.bit_length() - 1, 0))
    return guess.union(guess, most_bins)


def _grid_of(element: float, exponent: int) -> Grid:
    index = math.floor(math.ldexp(element, -exponent))
    return Grid(exponent, index - (element < 0 and index == 0), 1)
