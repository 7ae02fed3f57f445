"""Shards as Zarr groups (format 3), one array for each feature map; needs `zarr`.

The attributes of the group hold what a safetensors shard has in its metadata, the keys among them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from trocar._base.replacement import folder_replacement
from trocar._export.ragged import SHAPES
from trocar._export.schema import Column, Schema
from trocar._export.writers.shard_writer import ShardContent, ShardFormat, pieces, read_rows
from trocar._extras import need
from trocar.errors import MissingExtraError


def _write(path: Path, shard: ShardContent) -> None:
    import zarr

    with folder_replacement(path) as partial_path:
        group = zarr.open_group(partial_path, mode="w-", zarr_format=3, attributes=dict(shard.metadata))
        _write_arrays(group, shard)


def _write_arrays(group: Any, shard: ShardContent) -> None:
    names = {column.stem: column.name for column in shard.schema.columns}
    for stem, array in shard.stored(stems=True).items():
        chunk = next((piece.shape for piece in pieces(array)), array.shape)
        stored = group.create_array(
            stem,
            shape=array.shape,
            dtype=array.dtype,
            chunks=tuple(max(1, size) for size in chunk),
            attributes={"name": names.get(stem) or names[stem.removesuffix(SHAPES)] + SHAPES},
        )
        start = 0
        for piece in pieces(array):
            stored[start : start + len(piece)] = piece
            start += len(piece)


def _read(path: Path, schema: Schema) -> tuple[Mapping[str, Any], Sequence[str]]:
    import zarr

    group = zarr.open_group(path, mode="r")
    keys = json.loads(str(group.attrs["trocar.images"]))
    arrays = {
        column.name: read_rows(column, _flat(group, column), partial(_whole, group, column.stem + SHAPES))
        for column in schema.columns
    }
    return arrays, keys


def _flat(group: Any, column: Column) -> Any:
    """Return an array; of rows that differ in size, one of one dimension."""
    stored = group[column.stem]
    return _FlatArray(stored) if column.is_ragged and len(stored.shape) > 1 else stored


def _whole(group: Any, name: str) -> Any:
    return group[name][:]


class _FlatArray:
    """A Zarr array (tokens, ...) seen as one dimension; slices are of whole tokens."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored
        self._width = math.prod(stored.shape[1:])
        self.shape = (stored.shape[0] * self._width,)

    def __getitem__(self, values: slice) -> Any:
        width = max(1, self._width)
        return self._stored[values.start // width : values.stop // width].reshape(-1)


def _need() -> None:
    need("the format zarr", "datasets", "zarr")
    import zarr

    if int(zarr.__version__.split(".")[0]) < 3:
        raise MissingExtraError(
            f'the format zarr needs zarr 3, not {zarr.__version__}: pip install "trocar[datasets]"'
        )


def _check(schema: Schema) -> None:
    """Accept every dtype that a feature map can have."""


ZARR = ShardFormat("zarr", ".zarr", _write, _read, _check, _need)
