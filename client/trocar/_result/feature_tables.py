"""Feature tables: a row for each sample, a column for each number of its feature maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trocar._base.dimensions import samples_dim
from trocar._result.plain_table import PlainTable, numbered_columns

if TYPE_CHECKING:
    from trocar._base.tensors import Array
    from trocar._result.feature_maps import FeatureMaps
    from trocar._result.statistics import AnyStatistic

SAMPLE = "sample"
"""The name of the first column: the key of a sample, or its number."""


def sample_table(keys: Array, maps: Mapping[str, Array]) -> PlainTable:
    """Return the table of feature maps that have a row for each sample.

    Args:
        keys: Of the samples.
        maps: Arrays of shape (samples, ...).

    Raises:
        ValueError: There are too many numbers for a plain table.
    """
    columns: dict[str, Array] = {SAMPLE: keys}
    for name, values in maps.items():
        columns |= numbered_columns(name, values)
    return PlainTable(columns)


def feature_map_table(maps: FeatureMaps) -> PlainTable:
    """Return the table of one pass.

    Raises:
        ValueError: Nothing has values, a feature map has no row for each sample or a row for each token, or
            there are too many numbers.
    """
    rows = {name: _rows(maps, name) for name in maps}
    if not rows:
        raise ValueError("there are no values for a table; every tap has values=False")
    counts = {name: len(values) for name, values in rows.items()}
    if len(set(counts.values())) > 1:
        raise ValueError(f"the feature maps differ in rows: {counts}; choose some of them")
    return sample_table(np.arange(next(iter(counts.values()))), rows)


def _rows(maps: FeatureMaps, name: str) -> Array:
    """Return a feature map with its samples in the first dimension."""
    values, axes = maps[name], maps.info[name].axes
    dim = samples_dim(axes) if axes else 0
    if dim is None or not values.ndim:
        raise ValueError(f"{name!r} of shape {values.shape} does not have one row for each sample")
    has_texts = any(entry.padded_length for entry in maps.processed)
    if has_texts and any(axis.endswith("tokens") for axis in axes):
        raise ValueError(
            f"{name!r} has values for each token, and texts differ in tokens; reduce them, for example with "
            'tap(..., reduce=trocar.pool("avg")), or take maps.samples(name)'
        )
    return np.moveaxis(values, dim, 0)


def statistics_table(over: str, statistics: Mapping[str, AnyStatistic]) -> PlainTable:
    """Return statistics: a row for each channel or sample, or a single one; a column for each number.

    Raises:
        ValueError: There is nothing but histograms, or a covariance has too many numbers.
    """
    single = over == "all"
    arrays = {
        name: np.asarray(value)[None] if single else np.asarray(value)
        for name, value in statistics.items()
        if isinstance(value, (int, float, np.ndarray))
    }
    if not arrays:
        raise ValueError("there are no numbers for a table; histograms have .counts and .edges")
    columns: dict[str, Array] = {}
    if not single:
        columns[over] = np.arange(len(next(iter(arrays.values()))))
    for name, values in arrays.items():
        columns |= numbered_columns(name, values)
    return PlainTable(columns)


def check_all_rows(names: Sequence[str], ragged: Sequence[str]) -> None:
    """Refuse feature maps whose rows differ in size.

    Raises:
        ValueError: There is one.
    """
    if ragged:
        kept = [name for name in names if name not in ragged]
        rest = f"; the others are {', '.join(kept)}" if kept else ""
        raise ValueError(
            f"rows of {ragged[0]!r} differ in size, so that they have no columns in common{rest}. Extract it "
            'with tap(..., reduce=trocar.pool("avg")), or choose others with names='
        )
