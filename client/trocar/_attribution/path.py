"""The straight path from a baseline to the inputs: integrated gradients and layer conductance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from trocar._attribution.scaling import Floats
    from trocar._base.tensors import Array


@dataclass(frozen=True)
class Rule:
    """Points of the Gauss-Legendre rule on [0, 1], in ascending order."""

    alphas: Floats
    """Where: 0 is the baseline, 1 the inputs."""
    weights: Floats
    """Their shares of the integral; sum to 1."""


def gauss_legendre(count: int) -> Rule:
    """Return the rule with so many points, which is captum's `gausslegendre`."""
    points, weights = np.polynomial.legendre.leggauss(count)
    return Rule(0.5 * (1 + points), 0.5 * weights)


@dataclass(frozen=True)
class Interpolants:
    """Batches of points on the path, for all samples at once; can be iterated again.

    A batch has shape (points x samples, ...): all samples at the first point, then at the next. Every batch
    holds as many points, so that one list of classes fits all: the last point is repeated at the end.
    """

    inputs: Array
    """Where the path ends, (samples, ...)."""
    baseline: Array
    """Where it begins, of the same shape."""
    alphas: Floats
    """The points."""
    per_batch: int
    """Points in one batch."""

    def __iter__(self) -> Iterator[Array]:
        span = self.inputs - self.baseline
        for start in range(0, len(self.alphas), self.per_batch):
            points = self.alphas[start : start + self.per_batch]
            padded = np.pad(points, (0, self.per_batch - len(points)), mode="edge")
            factors = padded.astype(self.inputs.dtype).reshape(-1, *(1,) * self.inputs.ndim)
            batch = self.baseline + factors * span
            yield batch.reshape(-1, *self.inputs.shape[1:])

    def points(self, values: Array, batch: int) -> Array:
        """Return a batch's values as (points, samples, ...), without padding."""
        count = min(self.per_batch, len(self.alphas) - batch * self.per_batch)
        return values.reshape(self.per_batch, len(self.inputs), *values.shape[1:])[:count]


class PathIntegral:
    """The integral of a gradient along a path, from batches in order.

    Args:
        weights: Of the rule.
    """

    def __init__(self, weights: Floats) -> None:
        self._weights = weights
        self._taken = 0
        self._sum: Floats | None = None

    def add(self, gradients: Array) -> None:
        """Add the gradients at the next points, (points, samples, ...)."""
        weights = self._weights[self._taken : self._taken + len(gradients)]
        part = np.einsum("p,p...->...", weights, gradients.astype(np.float64))
        self._taken += len(gradients)
        self._sum = part if self._sum is None else self._sum + part

    @property
    def value(self) -> Floats:
        """The integral, (samples, ...)."""
        return _made(self._sum)


class Conductance:
    """sum of gradient(i) x (value(i + 1) - value(i)) along a path, from batches in order (Dhamdhere 2018)."""

    def __init__(self) -> None:
        self._sum: Floats | None = None
        self._last: tuple[Floats, Floats] | None = None

    def add(self, values: Array, gradients: Array) -> None:
        """Add a feature map and its gradient at the next points, both (points, samples, ...)."""
        v, g = values.astype(np.float64), gradients.astype(np.float64)
        if self._last is not None:
            v = np.concatenate([self._last[0][None], v])
            g = np.concatenate([self._last[1][None], g])
        self._last = (v[-1], g[-1])
        part = (g[:-1] * np.diff(v, axis=0)).sum(axis=0)
        self._sum = part if self._sum is None else self._sum + part

    @property
    def value(self) -> Floats:
        """The conductance, (samples, ...)."""
        return _made(self._sum)


def convergence_delta(attributions: Array, end: Floats, start: Floats) -> Floats:
    """Return sum of the attributions - (score of the inputs - score of the baseline), for each sample."""
    total = attributions.reshape(len(attributions), -1).sum(axis=1, dtype=np.float64)
    delta: Floats = total - (end - start)
    return delta


def joined(parts: Sequence[Array]) -> Array:
    """Concatenate groups of samples."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _made(total: Floats | None) -> Floats:
    if total is None:
        raise ValueError("the path has no points")
    return total
