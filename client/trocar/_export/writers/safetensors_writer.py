"""Shards as safetensors files, written piece by piece.

The format (https://github.com/huggingface/safetensors): the header's length in 8 bytes, the header as
JSON, then every tensor's bytes in one piece each. The library's own writer wants all arrays in memory.
"""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from trocar._base.replacement import write_file
from trocar._base.tensors import Array
from trocar._export.ragged import SHAPES
from trocar._export.schema import Schema
from trocar._export.writers.shard_writer import ShardContent, ShardFormat, read_rows, row_bytes
from trocar.errors import OutputError

MAX_HEADER_BYTES = 100_000_000
"""Of a file: what safetensors itself reads."""
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
"""The format's name of each dtype that it has, by NumPy's name."""

ArraySpec = tuple[np.dtype[Any], tuple[int, ...]]
"""Dtype and shape."""


def header(tensors: Mapping[str, ArraySpec], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Return the bytes before the first tensor, and where each tensor's bytes begin in the file.

    Raises:
        OutputError: The file format has no such dtype.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    starts: dict[str, int] = {}
    end = 0
    # Wide elements first, as safetensors does: every tensor is then aligned to its elements.
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
        starts[name], end = end, end + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": _dtype_name(name, dtype),
            "shape": shape,
            "data_offsets": (starts[name], end),
        }
    encoded = json.dumps(entries).encode()
    encoded += b" " * (-len(encoded) % 8)
    before = struct.pack("<Q", len(encoded)) + encoded
    return before, {name: len(before) + start for name, start in starts.items()}


def _write(path: Path, shard: ShardContent) -> None:
    arrays = shard.stored()
    tensors = {name: (array.dtype, array.shape) for name, array in arrays.items()}
    before, starts = header(tensors, shard.metadata)
    ordered = sorted(starts, key=lambda name: starts[name])
    write_file(path, chain([before], *(row_bytes(arrays[name]) for name in ordered)), is_durable=True)


def _read(path: Path, schema: Schema) -> tuple[Mapping[str, Array], Sequence[str]]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > MAX_HEADER_BYTES:
            raise OutputError(f"a header of {length:,} bytes; the limit is {MAX_HEADER_BYTES:,}")
        entries = json.loads(file.read(length))

    def array(name: str, dtype: Any) -> Array:
        shape, (start, end) = tuple(entries[name]["shape"]), entries[name]["data_offsets"]
        if start == end:
            return np.empty(shape, dtype)  # nothing can be mapped
        return np.memmap(path, dtype, "r", offset=8 + length + start, shape=shape)

    arrays = {
        column.name: read_rows(
            column, array(column.name, column.dtype), partial(array, column.name + SHAPES, np.int64)
        )
        for column in schema.columns
    }
    return arrays, json.loads(entries["__metadata__"]["trocar.images"])


def _check(schema: Schema) -> None:
    for column in schema.columns:
        _dtype_name(column.name, column.dtype)


def _dtype_name(name: str, dtype: np.dtype[Any]) -> str:
    if dtype.name not in DTYPES:
        raise OutputError(f"'{name}' is {dtype}, which a safetensors file cannot store")
    return DTYPES[dtype.name]


SAFETENSORS = ShardFormat("safetensors", ".safetensors", _write, _read, _check)
