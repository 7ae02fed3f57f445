"""Differences: distances between two arrays, accumulated over batches in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trocar._analysis.moments import Floats
from trocar._base.tensors import Array

_BLOCK = 1 << 20
"""Elements that are converted to float64 at once."""


@dataclass
class Differences:
    """Sums over the elements of pairs of arrays of one shape.

    Elements that are NaN on both sides, or the same infinity, are equal and count in no sum. Any other
    NaN or infinity makes the distance infinite.
    """

    count: int = 0
    """Elements that are finite on both sides."""
    sum_a: float = 0.0
    sum_b: float = 0.0
    dot: float = 0.0
    square_a: float = 0.0
    square_b: float = 0.0
    square_difference: float = 0.0
    max_abs: float = 0.0
    nonfinite_a: int = 0
    nonfinite_b: int = 0
    is_unequal: bool = False
    """Whether something is not finite on one side and another thing on the other."""

    def add(self, a: Array, b: Array) -> None:
        """Add the next pair, of one shape."""
        flat_a, flat_b = _flat(a), _flat(b)
        for start in range(0, flat_a.size, _BLOCK):
            self._add(_floats(flat_a[start : start + _BLOCK]), _floats(flat_b[start : start + _BLOCK]))

    @property
    def mean_a(self) -> float:
        """Mean of a's elements that are finite on both sides; NaN without any."""
        return self.sum_a / self.count if self.count else math.nan

    @property
    def mean_b(self) -> float:
        """Mean of the same elements of b."""
        return self.sum_b / self.count if self.count else math.nan

    @property
    def cosine(self) -> float:
        """Cosine of the angle between the two, -1 to 1; NaN where one is zero or they are not comparable."""
        norms = math.sqrt(self.square_a) * math.sqrt(self.square_b)
        if self.is_unequal or not norms:
            return math.nan
        return min(max(self.dot / norms, -1.0), 1.0)

    @property
    def relative_error(self) -> float:
        """|a - b| / |a| with Euclidean norms; infinite where only a is zero or they are not comparable."""
        if self.is_unequal:
            return math.inf
        if not self.square_difference:
            return 0.0
        return math.sqrt(self.square_difference) / math.sqrt(self.square_a) if self.square_a else math.inf

    @property
    def max_difference(self) -> float:
        """Largest absolute difference; infinite where they are not comparable."""
        return math.inf if self.is_unequal else self.max_abs

    def _add(self, a: Floats, b: Floats) -> None:
        finite_a, finite_b = np.isfinite(a), np.isfinite(b)
        both = finite_a & finite_b
        if not both.all():
            self.nonfinite_a += int(a.size - finite_a.sum())
            self.nonfinite_b += int(b.size - finite_b.sum())
            equal = (a == b) | (np.isnan(a) & np.isnan(b))
            self.is_unequal |= not bool((both | equal).all())
            a, b = a[both], b[both]
        with np.errstate(over="ignore"):  # a sum of squares above 1.8e308 is infinite
            difference = a - b
            self.count += a.size
            self.sum_a += float(a.sum())
            self.sum_b += float(b.sum())
            self.dot += float(a @ b)
            self.square_a += float(a @ a)
            self.square_b += float(b @ b)
            self.square_difference += float(difference @ difference)
        if difference.size:
            self.max_abs = max(self.max_abs, float(np.abs(difference).max()))


def _flat(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1)


def _floats(flat: Array) -> Floats:
    """Return real numbers in float64; a complex one is a pair."""
    if np.iscomplexobj(flat):
        return flat.astype(np.complex128).view(np.float64)
    return flat.astype(np.float64)
