"""Shards as folders of `.npy` files, one for each feature map, and `keys.json`."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trocar._base.tensors import Array, flat_bytes
from trocar._export.ragged import SHAPES
from trocar._export.schema import Schema
from trocar._export.writers.shard_writer import ShardContent, ShardFormat, pieces, read_rows

_KEYS = "keys.json"


def _write(path: Path, shard: ShardContent) -> None:
    path.mkdir()
    for stem, array in shard.stored(stems=True).items():
        _write_array(path / f"{stem}.npy", array)
    (path / _KEYS).write_text(json.dumps(list(shard.keys)), encoding="utf-8")


def _write_array(path: Path, array: Array) -> None:
    descr = np.lib.format.dtype_to_descr(array.dtype)
    with path.open("xb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": descr, "fortran_order": False, "shape": array.shape}
        )
        for piece in pieces(array):
            file.write(flat_bytes(np.ascontiguousarray(piece)).data)


def _read(path: Path, schema: Schema) -> tuple[Mapping[str, Any], Sequence[str]]:
    arrays: dict[str, Any] = {}
    for column in schema.columns:
        file = path / f"{column.stem}.npy"
        # Nothing can be mapped of an empty array.
        is_mapped = column.is_ragged or column.row_bytes
        values = np.load(file, mmap_mode="r") if is_mapped else np.load(file)
        arrays[column.name] = read_rows(
            column, values, partial(np.load, path / f"{column.stem}{SHAPES}.npy", allow_pickle=False)
        )
    return arrays, json.loads((path / _KEYS).read_text(encoding="utf-8"))


def _check(schema: Schema) -> None:
    """Accept every dtype that a feature map can have."""


NUMPY = ShardFormat("npy", "", _write, _read, _check)
