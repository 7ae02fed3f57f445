"""Shards as Zarr groups (format 3), one array for each feature map; needs `zarr`.

The attributes of the group hold what a safetensors shard has in its metadata, the keys among them.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trocar._datasets.schema import Schema
from trocar._datasets.writers.shard import Format, Shard, pieces
from trocar.errors import OutputError


def _write(path: Path, shard: Shard) -> None:
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
    _check(schema)
    import zarr

    group = zarr.open_group(path, mode="r")
    keys = json.loads(str(group.attrs["trocar.images"]))
    return {column.name: group[column.stem] for column in schema.columns}, keys


def _check(schema: Schema) -> None:
    try:
        import zarr
    except ImportError as error:
        raise OutputError('--format zarr needs a library: pip install "trocar[datasets]"') from error
    if int(zarr.__version__.split(".")[0]) < 3:
        raise OutputError(
            f"--format zarr needs zarr 3, not {zarr.__version__}: pip install 'trocar[datasets]'"
        )


ZARR = Format("zarr", ".zarr", _write, _read, _check)
