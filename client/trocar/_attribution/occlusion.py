"""Occlusion: the drop of a score when a window of the input is replaced (Zeiler and Fergus 2014)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from trocar._attribution.scaling import Floats
    from trocar._base.tensors import Array

_DEFAULT_WINDOWS = 14
"""About so many windows fit beside each other along the height and the width, when no size is given."""


@dataclass(frozen=True)
class Windows:
    """Positions of windows in one sample; those at the far ends are cut off, as captum does."""

    shape: tuple[int, ...]
    """Of one sample."""
    window: tuple[int, ...]
    """The size of a window along each dimension."""
    stride: tuple[int, ...]
    """Their distance along each dimension."""

    def __post_init__(self) -> None:
        for name, sizes in (("window", self.window), ("stride", self.stride)):
            if len(sizes) != len(self.shape):
                raise ValueError(f"{name}={sizes} needs one size for each dimension of a sample {self.shape}")
            if any(size < 1 for size in sizes):
                raise ValueError(f"{name}={sizes} must be 1 or more along each dimension")
        if any(size > whole for size, whole in zip(self.window, self.shape, strict=True)):
            raise ValueError(f"window={self.window} is larger than a sample {self.shape}")
        if any(
            step > size and size < whole
            for step, size, whole in zip(self.stride, self.window, self.shape, strict=True)
        ):
            raise ValueError(f"stride={self.stride} leaves gaps between windows of {self.window}")

    def __len__(self) -> int:
        return math.prod(len(starts) for starts in self._starts())

    def __iter__(self) -> Iterator[tuple[slice, ...]]:
        for corner in itertools.product(*self._starts()):
            yield tuple(slice(start, start + size) for start, size in zip(corner, self.window, strict=True))

    def _starts(self) -> list[list[int]]:
        return [
            [index * step for index in range(-(-(whole - size) // step) + 1)]
            for whole, size, step in zip(self.shape, self.window, self.stride, strict=True)
        ]


def windows(
    shape: tuple[int, ...], window: int | tuple[int, ...] | None, stride: int | tuple[int, ...] | None
) -> Windows:
    """Place the windows in a sample.

    Args:
        shape: Of one sample, for example (channels, height, width).
        window: A size along the last two dimensions, through all channels; or one for each dimension. About
            a fourteenth of the height and the width when None.
        stride: A distance along every dimension, or one for each; half a window when None.

    Raises:
        ValueError: A size does not fit, or windows would leave gaps.
    """
    leading = shape[:-2] if len(shape) > 2 else ()
    inner = shape[len(leading) :]
    if window is None:
        window = (*leading, *(-(-size // _DEFAULT_WINDOWS) for size in inner))
    elif isinstance(window, int):
        window = (*leading, *(window for _ in inner))
    if stride is None:
        stride = tuple(max(1, size // 2) for size in window)
    elif isinstance(stride, int):
        stride = tuple(stride for _ in shape)
    return Windows(shape, tuple(window), tuple(stride))


@dataclass(frozen=True)
class OccludedBatches:
    """The inputs with one window after another replaced, (windows x samples, ...); can be iterated again."""

    inputs: Array
    """Of shape (samples, ...)."""
    baseline: Array
    """What stands in a window, of the same shape."""
    windows: Windows
    """Where they lie."""
    per_batch: int
    """Windows in one batch."""

    def __iter__(self) -> Iterator[Array]:
        for places in self.places():
            batch = np.repeat(self.inputs[None], len(places), axis=0)
            for occluded, place in zip(batch, places, strict=True):
                occluded[:, *place] = self.baseline[:, *place]
            yield batch.reshape(-1, *self.inputs.shape[1:])

    def places(self) -> Iterator[list[tuple[slice, ...]]]:
        """Yield the windows of each batch."""
        every = iter(self.windows)
        while places := list(itertools.islice(every, self.per_batch)):
            yield places


class OcclusionSum:
    """The mean drop of the score, over the windows that cover an element.

    Args:
        shape: Of the inputs, (samples, ...).
        scores: Of the inputs as they are, (samples,).
    """

    def __init__(self, shape: tuple[int, ...], scores: Floats) -> None:
        self._scores = scores
        self._sum = np.zeros(shape)
        self._count = np.zeros(shape[1:])

    def add(self, places: list[tuple[slice, ...]], scores: Floats) -> None:
        """Add the scores of a batch, (windows x samples,)."""
        lost = self._scores - scores.reshape(len(places), -1)
        ones = (1,) * (self._sum.ndim - 1)
        for place, difference in zip(places, lost, strict=True):
            self._sum[:, *place] += difference.reshape(-1, *ones)
            self._count[place] += 1

    @property
    def value(self) -> Floats:
        """The attributions, (samples, ...)."""
        result: Floats = self._sum / self._count
        return result
