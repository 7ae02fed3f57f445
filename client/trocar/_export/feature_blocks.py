"""Blocks of rows of a folder of features: for searches, and for tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from trocar._export.features import RaggedColumn
from trocar._result.feature_tables import check_all_rows, sample_table

if TYPE_CHECKING:
    from trocar._export.features import FeatureColumn, Features
    from trocar._result.plain_table import PlainTable

_BLOCK_BYTES = 8 << 20
"""Of the rows that are in memory at once, in float64."""
_MOST_ROWS = 65_536


def rows_at_once(columns: Sequence[FeatureColumn]) -> int:
    """Return how many rows of some feature maps are a block."""
    row_bytes = sum(8 * int(np.prod(column.shape[1:], dtype=np.int64)) for column in columns)
    return min(max(1, _BLOCK_BYTES // max(row_bytes, 1)), _MOST_ROWS)


def whole_table(features: Features, names: str | Sequence[str] | None) -> PlainTable:
    """Return the table of all rows.

    Raises:
        KeyError: No feature map has this name.
        ValueError: Rows differ in size, or there are too many numbers for a plain table.
    """
    return _table(features, _columns(features, names), 0, len(features.sample_keys))


def table_blocks(features: Features, names: str | Sequence[str] | None) -> Iterator[PlainTable]:
    """Return the same in blocks of rows, at least one; what is wrong is raised before the first.

    Raises:
        KeyError: No feature map has this name.
        ValueError: Rows differ in size, or there are too many numbers for a plain table.
    """
    columns, count = _columns(features, names), len(features.sample_keys)
    _table(features, columns, 0, min(count, 1))
    step = rows_at_once(list(columns.values()))
    starts = range(0, max(count, 1), step)
    return (_table(features, columns, start, min(start + step, count)) for start in starts)


def _columns(features: Features, names: str | Sequence[str] | None) -> dict[str, FeatureColumn]:
    chosen = list(features) if names is None else [names] if isinstance(names, str) else list(names)
    columns = {name: features[name] for name in chosen}
    if not columns:
        raise ValueError("there are no feature maps for a table")
    check_all_rows(chosen, [name for name, column in columns.items() if isinstance(column, RaggedColumn)])
    return columns


def _table(features: Features, columns: dict[str, FeatureColumn], start: int, stop: int) -> PlainTable:
    keys = np.array(features.sample_keys[start:stop], object)
    return sample_table(keys, {name: column[start:stop] for name, column in columns.items()})
