"""Queries of a search: rows of features with their names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trocar._base.dimensions import samples_dim
from trocar._base.tensors import Array, float_array, is_array

if TYPE_CHECKING:
    from trocar._request.taps import Tap
    from trocar._result.feature_maps import FeatureMaps


@dataclass(frozen=True)
class Queries:
    """Rows whose neighbours are searched."""

    rows: Array
    """Of shape (queries, ...)."""
    names: tuple[str, ...]
    """One for each."""
    inputs: tuple[Any, ...] = ()
    """Of the first ones, for a picture."""


def named_queries(names: list[str]) -> tuple[str, ...]:
    """Return the names of queries; those without one are numbered."""
    return tuple(name or f"query {place}" for place, name in enumerate(names))


def queries_of_vectors(vector: object, row_shape: tuple[int, ...] | None = None) -> Queries:
    """Return features of a caller's own as queries.

    Args:
        vector: One row, or several in the first dimension; flat, or of the shape of a row.
        row_shape: The shape of a row, if it is known.

    Raises:
        TypeError: It is no array of numbers.
        ValueError: It is neither a row nor rows.
    """
    if not isinstance(vector, (list, tuple)) and not is_array(vector):
        raise TypeError(f"{type(vector).__name__} is no vector; give an array of features")
    values = np.asarray(vector) if isinstance(vector, (list, tuple)) else float_array(vector)
    if values.dtype.kind not in "fiub":
        raise TypeError(f"a vector of {values.dtype}; give numbers")
    if row_shape is not None and values.shape in (row_shape, (1, *row_shape)):
        values = values.reshape(1, -1)
    elif values.ndim == 1:
        values = values[None]
    elif values.ndim != 2 and values.shape[1:] != row_shape:
        shapes = "(features,) or (queries, features)"
        raise ValueError(f"a vector of shape {values.shape}; give {shapes}, or rows as they were extracted")
    return Queries(values.reshape(len(values), -1), named_queries([""] * len(values)))


def rows_of(maps: FeatureMaps, where: Tap) -> Array:
    """Return the values of a batch with the samples in the first dimension.

    Raises:
        ValueError: The tap matches several values, or one without a row for each sample.
    """
    names = list(maps)
    if len(names) != 1:
        raise ValueError(
            f"{where.selector!r} matches {len(names)} values: {', '.join(names[:5])}; choose one"
        )
    values, axes = maps[names[0]], maps.info[names[0]].axes
    rows = samples_dim(axes) if axes else 0
    if rows is None or not values.ndim:
        raise ValueError(f"{names[0]!r} of shape {values.shape} does not have one row for each sample")
    return np.moveaxis(values, rows, 0)
