"""Plain tables: columns of numbers and words, for pandas, `.csv` and `.parquet` files."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trocar._base.replacement import replacement, write_file
from trocar._base.tensors import Array
from trocar._extras import need

MOST_COLUMNS = 16_384
"""Columns of a table, as many as a spreadsheet has."""
SUFFIXES = (".csv", ".parquet")
_EXTRA = "pandas"


class PlainTable:
    """Columns of equal length by name; each holds one number or one text in a row.

    Args:
        columns: One-dimensional arrays.

    Raises:
        ValueError: There are too many columns.
    """

    def __init__(self, columns: Mapping[str, Array]) -> None:
        if len(columns) > MOST_COLUMNS:
            raise ValueError(
                f"{len(columns):,} columns, one for each number; a plain table has at most {MOST_COLUMNS:,}. "
                'Reduce the values first, for example with tap(..., reduce=trocar.pool("avg")) or channels=, '
                "or keep the arrays in .safetensors"
            )
        self._columns = dict(columns)

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame.

        Raises:
            MissingExtraError: pandas is missing.
        """
        need("to_pandas", _EXTRA, "pandas")
        import pandas as pd

        return pd.DataFrame(self._columns)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a `.csv` or `.parquet` file; see `save_blocks`."""
        save_blocks(path, [self])

    @property
    def columns(self) -> Mapping[str, Array]:
        """The columns by name."""
        return self._columns

    def csv_rows(self) -> str:
        """Return the rows as CSV, without the names of the columns."""
        # Python's shortest text of a float32 is that of the float64 it becomes; NumPy's keeps its own digits.
        cells = [
            column.astype(str) if column.dtype.kind == "f" else column for column in self._columns.values()
        ]
        return _csv(zip(*(column.tolist() for column in cells), strict=True))


def save_blocks(path: str | os.PathLike[str], blocks: Iterable[PlainTable]) -> None:
    """Write tables of equal columns below one another, complete or not at all; memory is one block.

    Args:
        path: The file, `.csv` or `.parquet`.
        blocks: At least one.

    Raises:
        ValueError: The file's name ends in neither.
        MissingExtraError: pyarrow is missing, for Parquet.
        OSError: The file cannot be written; an existing one is as it was.
    """
    target = check_table_path(path)
    if target.suffix == ".csv":
        write_file(target, _csv_pieces(blocks))
        return
    import pyarrow
    from pyarrow import parquet

    writer = None
    with replacement(target) as partial:
        try:
            for block in blocks:
                table = pyarrow.table(dict(block.columns))
                writer = writer or parquet.ParquetWriter(partial, table.schema)
                writer.write_table(table)
        finally:
            if writer is not None:
                writer.close()


def is_table_path(path: str | os.PathLike[str]) -> bool:
    """Whether a file's name is that of a table."""
    return Path(path).suffix in SUFFIXES


def check_table_path(path: str | os.PathLike[str]) -> Path:
    """Check that a table can be written to a path, before anything is read for it.

    Raises:
        ValueError: The file's name ends in neither `.csv` nor `.parquet`.
        MissingExtraError: pyarrow is missing, for Parquet.
    """
    target = Path(path)
    if not is_table_path(target):
        raise ValueError(f"{target.name!r} must end in {' or '.join(SUFFIXES)}")
    if target.suffix == ".parquet":
        need("Parquet", _EXTRA, "pyarrow", "pyarrow.parquet")
    return target


def _csv_pieces(blocks: Iterable[PlainTable]) -> Iterator[bytes]:
    for place, block in enumerate(blocks):
        head = "" if place else _csv([tuple(block.columns)])
        yield (head + block.csv_rows()).encode("utf-8", "backslashreplace")  # of paths that are no UTF-8


def _csv(rows: Iterable[tuple[object, ...]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def numbered_columns(name: str, values: Array) -> dict[str, Array]:
    """Return a column for each number of a row: `fc[0]`, `conv1[3,0,1]`; sizes of 1 are not numbered.

    Args:
        name: The feature map.
        values: Of shape (rows, ...).

    Raises:
        ValueError: There are too many.
    """
    shape = [size for size in values.shape[1:] if size != 1]
    count = int(np.prod(shape, dtype=np.int64))
    if count > MOST_COLUMNS:
        raise ValueError(
            f"{name!r} has {count:,} numbers for each sample; a plain table has at most {MOST_COLUMNS:,} "
            'columns. Reduce it first, for example with tap(..., reduce=trocar.pool("avg")) or channels=, or '
            "keep the array in .safetensors"
        )
    flat = values.reshape(len(values), -1)
    if not shape:
        return {name: flat[:, 0]}
    places = (",".join(map(str, place)) for place in np.ndindex(*shape))
    return {f"{name}[{place}]": flat[:, column] for column, place in enumerate(places)}
