"""Shards as Zarr groups (format 3), one array for each feature map; needs `zarr`.

The attributes of the group hold what a safetensors shard has in its metadata, the keys among them.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trocar._export.schema import Schema
from trocar._export.writers.shard_writer import ShardContent, ShardFormat, pieces
from trocar._extras import need
from trocar.errors import MissingExtraError


def _write(path: Path, shard: ShardContent) -> None:
    import zarr

    group = zarr.open_group(path, mode="w-", zarr_format=3, attributes=dict(shard.metadata))
    for column in shard.schema.columns:
        array = shard.arrays[column.name]
        chunk = next((piece.shape for piece in pieces(array)), array.shape)
        stored = group.create_array(
            column.stem,
            shape=array.shape,
            dtype=array.dtype,
            chunks=tuple(max(1, size) for size in chunk),
            attributes={"name": column.name},
        )
        start = 0
        for piece in pieces(array):
            stored[start : start + len(piece)] = piece
            start += len(piece)


def _read(path: Path, schema: Schema) -> tuple[Mapping[str, Any], Sequence[str]]:
    import zarr

    group = zarr.open_group(path, mode="r")
    keys = json.loads(str(group.attrs["trocar.images"]))
    return {column.name: group[column.stem] for column in schema.columns}, keys


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
