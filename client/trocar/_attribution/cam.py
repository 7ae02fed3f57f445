"""Class activation maps from a feature map and its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from trocar._attribution.scaling import Floats
    from trocar._base.tensors import Array

Grid: TypeAlias = "tuple[int, int] | Callable[[Array], Array] | None"
"""How tokens become positions: (height, width), or a function from (batch, tokens, width), or by itself."""

_EPSILON = 1e-6


def grad_cam(values: Array, gradients: Array) -> Floats:
    """Return relu(sum of channels x mean gradient), of Selvaraju et al. 2017, of shape (batch, ...).

    Args:
        values: The feature map, (batch, channels, ...).
        gradients: The gradient with respect to it, of the same shape.
    """
    weights = gradients.mean(axis=_positions(gradients), dtype=np.float64)
    return _combined(weights, values)


def grad_cam_plus_plus(values: Array, gradients: Array) -> Floats:
    """Return the map with the weights of Chattopadhyay et al. 2018, equation 19, as pytorch-grad-cam does.

    Args:
        values: The feature map, (batch, channels, ...).
        gradients: The gradient with respect to it, of the same shape.
    """
    g = gradients.astype(np.float64)
    axes = _positions(g)
    sums = values.sum(axis=axes, dtype=np.float64, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):  # a denominator of 0 gives the same as there
        shares = np.where(g != 0, g**2 / (2 * g**2 + sums * g**3 + _EPSILON), 0.0)
    return _combined((np.maximum(g, 0) * shares).sum(axis=axes), values)


def channels_first(values: Array, channel_dim: int | None = None, grid: Grid = None) -> Array:
    """Return a value as (batch, channels, height, width).

    Args:
        values: A feature map. One of rank 3 is (batch, tokens, width).
        channel_dim: The dimension of the channels of other ranks; 1 when None, -1 for a Swin.
        grid: Of tokens: (height, width), or a function that returns (batch, channels, height, width). When
            None, a square; tokens before it, such as a class token, are dropped.

    Raises:
        ValueError: There are no positions, tokens make no grid, or `channel_dim` is out of range.
    """
    if callable(grid):
        return _checked(grid(values), len(values))
    if values.ndim == 3 and channel_dim is None:
        return _tokens_as_grid(values, grid)
    if grid is not None:
        raise ValueError(f"grid is for tokens, (batch, tokens, width); the value has shape {values.shape}")
    if values.ndim < 3:
        raise ValueError(
            f"a value of shape {values.shape} has no spatial positions; choose a module before pooling"
        )
    dim = 1 if channel_dim is None else channel_dim
    if not 1 <= dim % values.ndim < values.ndim or not -values.ndim <= dim < values.ndim:
        raise ValueError(f"channel_dim={channel_dim} is not a dimension after the batch in {values.shape}")
    return np.moveaxis(values, dim, 1)


def _positions(values: Array) -> tuple[int, ...]:
    return tuple(range(2, values.ndim))


def _combined(weights: Floats, values: Array) -> Floats:
    total: Floats = np.einsum("bc,bc...->b...", weights, values.astype(np.float64))
    return np.maximum(total, 0.0)


def _tokens_as_grid(values: Array, grid: tuple[int, int] | None) -> Array:
    batch, count, width = values.shape
    if grid is None:
        side = math.isqrt(count)
        grid = (side, side)
        if count - side * side > 1:  # one class token at most; registers need an explicit grid
            raise ValueError(
                f"{count} tokens do not form a square, with or without class token; pass grid=(height, width)"
            )
    height, columns = grid
    if min(grid) < 1 or height * columns > count:
        raise ValueError(f"a grid of {height} x {columns} does not match the {count} tokens")
    kept = values[:, count - height * columns :]
    return np.moveaxis(kept.reshape(batch, height, columns, width), -1, 1)


def _checked(values: object, batch: int) -> Array:
    made = np.asarray(values)
    if made.ndim < 3 or len(made) != batch:
        raise ValueError(f"grid returned shape {made.shape}, not (batch, channels, height, width)")
    return made
