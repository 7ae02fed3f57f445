"""Class activation maps from a feature map and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import numpy as np

from trocar._base.dimensions import Described, arranged, samples_dim

if TYPE_CHECKING:
    from trocar._attribution.scaling import Floats
    from trocar._base.tensors import Array

Grid: TypeAlias = "tuple[int, int] | Callable[[Array], Array] | None"
"""How tokens become positions: (height, width), or a function from (batch, tokens, width), or by itself."""


Info = TypeVar("Info", bound=Described)

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


def channels_first(
    values: Array,
    channel_dim: int | None = None,
    grid: Grid = None,
    described: Described | None = None,
) -> Array:
    """Return a value as (batch, channels, ...): positions in its own order, patches as rows and columns.

    Args:
        values: A feature map.
        channel_dim: The dimension of its channels; where the model has them when None.
        grid: Of tokens: (height, width) of the last ones, or a function that returns (batch, channels,
            height, width). The patches that the model's own pass makes when None.
        described: What a reply says of its dimensions; None where nothing is known.

    Raises:
        ValueError: There are no positions, the grid does not fit, or `channel_dim` is out of range.
    """
    if callable(grid):
        return _checked(grid(values), len(values))
    known = arranged(values, described, channel_dim)
    if known is not None and values.ndim > 2:
        return _with_grid(known.values, grid) if grid is not None else known.with_patches()
    if grid is not None:
        return _with_grid(np.moveaxis(values, 2, 1) if values.ndim == 3 else values, grid)
    return _by_rank(values, channel_dim)


def samples_first(described: Info | None) -> Info | None:
    """Return a description; refuses one whose samples are not the first dimension.

    Raises:
        ValueError: They are in another dimension.
    """
    axes = () if described is None else described.axes
    dim = samples_dim(axes)
    if dim:
        raise ValueError(
            f"its samples are dimension {dim} of ({', '.join(axes)}); choose a value with samples first"
        )
    return described


def _with_grid(moved: Array, grid: tuple[int, int]) -> Array:
    """Return (batch, channels, tokens) with its last tokens as rows and columns."""
    if moved.ndim != 3:
        raise ValueError(f"grid is for values with one dimension of tokens, not {moved.shape}")
    count = moved.shape[2]
    height, columns = grid
    if min(grid) < 1 or height * columns > count:
        raise ValueError(f"a grid of {height} x {columns} does not match the {count} tokens")
    return moved[:, :, count - height * columns :].reshape(*moved.shape[:2], height, columns)


def _by_rank(values: Array, channel_dim: int | None) -> Array:
    """Return a value of which nothing is known: channels are dimension 1, unless said otherwise."""
    if values.ndim < 3:
        raise ValueError(
            f"a value of shape {values.shape} has no spatial positions; choose a module before pooling"
        )
    if values.ndim == 3 and channel_dim is None:
        raise ValueError(
            f"the meaning of the dimensions of a value of shape {values.shape} is not known; pass "
            "channel_dim=, or grid=(height, width) for the patches of (batch, tokens, width)"
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


def _checked(values: object, batch: int) -> Array:
    made = np.asarray(values)
    if made.ndim < 3 or len(made) != batch:
        raise ValueError(f"grid returned shape {made.shape}, not (batch, channels, height, width)")
    return made
