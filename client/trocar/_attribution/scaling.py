"""Scaling: maps of any range and size to heat maps from 0 to 1 of the input's size."""

import numpy as np
from numpy.typing import NDArray

from trocar._base.tensors import Array

Floats = NDArray[np.float64]

_EPSILON = 1e-7
"""Added to a map's maximum, as pytorch-grad-cam does."""
_OUTLIERS = 0.02
"""The share of the sum that may lie above 1, as in captum's pictures."""


def min_max_scaled(maps: Array) -> Floats:
    """Scale each sample to 0..1: (x - min) / (1e-7 + max - min), as pytorch-grad-cam does; NaN stays NaN.

    Args:
        maps: Of shape (batch, ...).
    """
    rows = _rows(maps)
    with np.errstate(invalid="ignore"):
        lowered = rows - _lowest(rows)
        scaled = lowered / (_EPSILON - _lowest(-lowered))
    return np.clip(scaled, 0.0, 1.0).reshape(maps.shape)


def share_scaled(maps: Array) -> Floats:
    """Scale absolute values to 0..1 so that few large ones do not hide the others; NaN stays NaN.

    Each sample is divided by the value up to which its values, from the smallest on, make 98 % of their
    sum; larger values become 1. This is what `captum.attr.visualization` shows as "absolute_value".

    Args:
        maps: Of shape (batch, ...).
    """
    rows = np.abs(_rows(maps))
    scaled = [row / limit if (limit := _share_limit(row)) > 0 else np.zeros_like(row) for row in rows]
    values = np.clip(np.reshape(scaled, maps.shape), 0.0, 1.0)
    return np.where(np.isnan(maps), np.nan, values)


def resized(maps: Array, height: int, width: int) -> Floats:
    """Resize bilinearly, with half-pixel centres and without antialiasing, as OpenCV and torch do.

    As there, NaN reaches only what is interpolated from it; a product of matrices would spread it everywhere.

    Args:
        maps: Of shape (batch, h, w).
        height: Rows wanted.
        width: Columns wanted.
    """
    wide = _interpolated(maps.astype(np.float64), width)
    return _interpolated(wide.swapaxes(1, 2), height).swapaxes(1, 2)


def _rows(maps: Array) -> Floats:
    return np.asarray(maps, np.float64).reshape(len(maps), -1)


def _lowest(rows: Floats) -> Floats:
    """Return the smallest finite value of each row, (batch, 1); 0 for none."""
    ends: Floats = np.where(np.isfinite(rows), rows, np.inf).min(axis=1, keepdims=True, initial=np.inf)
    return np.where(np.isfinite(ends), ends, 0.0)


def _share_limit(row: Floats) -> float:
    values = np.sort(row[np.isfinite(row)])
    if not values.size:
        return 0.0
    sums = np.cumsum(values)
    return float(values[np.searchsorted(sums, sums[-1] * (1 - _OUTLIERS))])


def _interpolated(maps: Floats, wanted: int) -> Floats:
    """Interpolate the last dimension linearly between its two neighbours."""
    size = maps.shape[-1]
    if size == wanted:
        return maps
    centres = np.clip((np.arange(wanted) + 0.5) * (size / wanted) - 0.5, 0, size - 1)
    lower = np.floor(centres).astype(int)
    share = centres - lower
    with np.errstate(invalid="ignore"):  # infinity times 0
        result: Floats = maps[..., lower] * (1 - share) + maps[..., np.minimum(lower + 1, size - 1)] * share
    return result
