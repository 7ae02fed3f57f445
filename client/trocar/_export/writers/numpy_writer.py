"""Shards as folders of `.npy` files, one for each feature map, and `keys.json`."""

import io
import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from trocar._base.replacement import folder_replacement, write_file
from trocar._base.tensors import Array
from trocar._export.ragged import SHAPES
from trocar._export.schema import Schema
from trocar._export.writers.shard_writer import ShardContent, ShardFormat, read_rows, row_bytes

_KEYS = "keys.json"


def _write(path: Path, shard: ShardContent) -> None:
    with folder_replacement(path) as partial_path:
        for stem, array in shard.stored(stems=True).items():
            write_file(partial_path / f"{stem}.npy", chain([_header(array)], row_bytes(array)))
        write_file(partial_path / _KEYS, json.dumps(list(shard.keys)))


def _header(array: Array) -> bytes:
    descr = np.lib.format.dtype_to_descr(array.dtype)
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": descr, "fortran_order": False, "shape": array.shape}
    )
    return header.getvalue()


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
