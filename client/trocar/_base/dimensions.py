"""Dimensions of values by what a reply says of them, not by their rank or lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from trocar._base.tensors import Array

SAMPLES = ("batch", "images")
"""Names of dimensions of samples."""
_NO_POSITIONS = (*SAMPLES, "channels", "heads", "", "?")


@dataclass(frozen=True)
class TokenGrid:
    """The patches of a picture along one dimension of a value, row by row."""

    dimension: int
    """The dimension, from 0."""
    sizes: tuple[int, ...]
    """Rows and columns; of a video frames before them."""
    first: int = 0
    """Tokens before the patches, such as class and register tokens."""


class Described(Protocol):
    """What a reply says of the dimensions of a value; `FeatureMapInfo` is one."""

    @property
    def axes(self) -> tuple[str, ...]:
        """What each dimension means; empty where nothing is known."""
        ...

    @property
    def channel_dim(self) -> int | None:
        """The dimension of the channels; None where that is not known."""
        ...

    @property
    def token_grids(self) -> tuple[TokenGrid, ...]:
        """The dimensions whose tokens are the patches of a picture."""
        ...


@dataclass(frozen=True)
class Arranged:
    """A value as (batch, channels, ...): its positions in their own order."""

    values: Array
    names: tuple[str, ...]
    """What each dimension means."""
    grids: tuple[TokenGrid, ...]
    """Its patches."""

    def with_patches(self) -> Array:
        """Return the values with patches as rows and columns, without the tokens around them."""
        values = self.values
        for grid in reversed(self.grids):
            dim = grid.dimension
            patches = np.take(values, range(grid.first, grid.first + math.prod(grid.sizes)), dim)
            values = patches.reshape(*patches.shape[:dim], *grid.sizes, *patches.shape[dim + 1 :])
        return values


def arranged(values: Array, described: Described | None, channel_dim: int | None = None) -> Arranged | None:
    """Return a value as (batch, channels, ...); None where its samples or channels are not known.

    Args:
        values: The value.
        described: What a reply says of it.
        channel_dim: Another dimension of the channels.

    Raises:
        ValueError: `channel_dim` is the dimension of the samples.
    """
    axes = () if described is None else described.axes
    if described is None or len(axes) != values.ndim or "?" in axes:
        return None
    samples, channels = samples_dim(axes), described.channel_dim if channel_dim is None else channel_dim
    if samples is None or channels is None:
        return None
    rest = [dim for dim in range(values.ndim) if dim not in {samples, channels % values.ndim}]
    if len(rest) != values.ndim - 2:
        raise ValueError(f"channel_dim={channel_dim} is the dimension of the samples in {values.shape}")
    order = (samples, channels % values.ndim, *rest)
    grids = [
        TokenGrid(order.index(grid.dimension), grid.sizes, grid.first)
        for grid in described.token_grids
        if grid.dimension in rest
    ]
    return Arranged(values.transpose(order), tuple(axes[dim] for dim in order), tuple(grids))


def samples_dim(axes: Sequence[str]) -> int | None:
    """Return the dimension of the samples; None without one."""
    return next((dim for dim, name in enumerate(axes) if name in SAMPLES), None)


def tokens_dim(axes: Sequence[str], shape: Sequence[int], length: int) -> int | None:
    """Return the first dimension of a text's tokens, of this length with padding; None without one."""
    fitting = [dim for dim, name in enumerate(axes) if name not in _NO_POSITIONS and shape[dim] == length]
    for is_own in (lambda name: name == "tokens", lambda name: name.endswith("tokens"), bool):
        dims = [dim for dim in fitting if is_own(axes[dim])]
        if dims:
            return dims[0]
    return None
