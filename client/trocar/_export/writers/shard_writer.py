"""Shard writer: the protocol of every format."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trocar._base.tensors import Array, flat_bytes
from trocar._export.ragged import SHAPES, RaggedRows
from trocar._export.schema import Column, Schema

PIECE_BYTES = 8 << 20
"""About how many bytes are in memory at once while a shard is written."""


@dataclass(frozen=True)
class ShardContent:
    """Contents of one shard."""

    schema: Schema
    arrays: Mapping[str, Array | RaggedRows]
    """Rows by column, on disk."""
    keys: Sequence[str]
    """Of the samples, one for each row."""

    def stored(self, stems: bool = False) -> dict[str, Array]:
        """Return the arrays of the files by name, or by the columns' names in file names.

        Rows that differ in size are two arrays: their values, and their shapes under the name with "#shapes".
        """
        result: dict[str, Array] = {}
        for column in self.schema.columns:
            name, rows = column.stem if stems else column.name, self.arrays[column.name]
            if isinstance(rows, RaggedRows):
                result[name], result[name + SHAPES] = rows.stored(column.row_shape), rows.shapes
            else:
                result[name] = rows
        return result

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of the files, as `FeatureMaps.save` writes it, and the keys."""
        info = {
            column.name: {**column.info, "shape": [len(self.keys), *column.row_shape]}
            for column in self.schema.columns
        }
        return {
            "trocar.model_id": self.schema.model_id,
            "trocar.expansions": json.dumps(self.schema.expansions),
            "trocar.info": json.dumps(info),
            "trocar.images": json.dumps(list(self.keys)),
        }


@dataclass(frozen=True)
class ShardFormat:
    """File format: writing and reading of shards."""

    name: str
    suffix: str
    """Of a shard's name; empty for a folder."""
    write: Callable[[Path, ShardContent], None]
    """Writes the complete file or folder, durably, in place of an older one."""
    read: Callable[[Path, Schema], "tuple[Mapping[str, Any], Sequence[str]]"]
    """Returns what can be sliced by rows, by column, and the keys."""
    check: Callable[[Schema], None]
    """Raises `OutputError` where a column cannot be written."""
    need: Callable[[], None] = lambda: None
    """Raises `MissingExtraError` where its library is not installed."""


def read_rows(column: Column, values: Any, shapes: Any) -> Any:
    """Return rows from what a format stored; `shapes` is called for rows that differ in size."""
    if not column.is_ragged:
        return values
    flat = values.reshape(-1) if isinstance(values, np.ndarray) else values
    return RaggedRows(flat, np.asarray(shapes()))


def pieces(array: Array, *, piece_bytes: int = PIECE_BYTES) -> Iterator[Array]:
    """Split an array into blocks of rows, each of about `piece_bytes` and at least one row."""
    row_bytes = max(1, array.nbytes // max(1, len(array)))
    step = max(1, piece_bytes // row_bytes)
    for start in range(0, len(array), step):
        yield array[start : start + step]


def row_bytes(array: Array) -> Iterator[memoryview]:
    """Yield the bytes of an array in C order, piece by piece."""
    for piece in pieces(array):
        yield flat_bytes(np.ascontiguousarray(piece)).data
