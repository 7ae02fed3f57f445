"""The header of a safetensors file from strangers, read with Python's own JSON and integers alone.

Layout: 8 bytes with the length of the header, little-endian; the header, JSON; the bytes of the tensors.
Source: huggingface.co/docs/safetensors, "Format".
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

MAX_HEADER_BYTES = 1 << 20
MAX_TENSORS = 10_000
MAX_RANK = 8

ITEM_BYTES = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes of one element, by the name of the dtype."""

_DTYPES = {
    "F64": "float64",
    "I64": "int64",
    "F32": "float32",
    "I32": "int32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_LENGTH_BYTES = 8
_METADATA = "__metadata__"


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    dtype: str
    """For example `float32`."""
    shape: tuple[int, ...]
    """All dimensions."""
    start: int
    """Where its bytes begin, from the beginning of the file."""
    byte_count: int
    """How many there are."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample: of one index of the first dimension."""
        return math.prod(self.shape[1:]) * ITEM_BYTES[self.dtype]


def read_header(descriptor: int) -> dict[str, Entry]:
    """Return the tensors of a file by name; every byte belongs to exactly one of them.

    Raises:
        ServiceError: `DATASET_INVALID`, the header is none, too large, or does not fit the file.
        OSError: It cannot be read.
    """
    size = os.fstat(descriptor).st_size
    length = int.from_bytes(os.pread(descriptor, _LENGTH_BYTES, 0), "little")
    if size < _LENGTH_BYTES or not 2 <= length <= min(MAX_HEADER_BYTES, size - _LENGTH_BYTES):
        raise invalid(f"its header has to be of 2 to {MAX_HEADER_BYTES:,} bytes and within the file")
    described = _parsed(os.pread(descriptor, length, _LENGTH_BYTES))
    described.pop(_METADATA, None)
    if not 0 < len(described) <= MAX_TENSORS:
        raise invalid(f"it has {len(described):,} tensors; 1 to {MAX_TENSORS:,} can be")
    first = _LENGTH_BYTES + length
    entries = {name: _entry(name, value, first) for name, value in described.items()}
    _check_coverage(entries, first, size)
    return entries


def invalid(problem: str) -> ServiceError:
    """Build the error for a file that is no shard."""
    return ServiceError(ErrorReason.DATASET_INVALID, f"a shard is no such safetensors file: {problem}")


def _parsed(header: bytes) -> dict[str, Any]:
    try:
        value = json.loads(header, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise invalid("its header is no JSON, or names something twice") from None
    if not isinstance(value, dict):
        raise invalid("its header is no JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _entry(name: str, value: object, first: int) -> Entry:
    if not isinstance(value, Mapping) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise invalid(f"{_shown(name)} needs dtype, shape and data_offsets, nothing else")
    dtype = _DTYPES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None:
        raise invalid(f"{_shown(name)} has none of the dtypes {', '.join(_DTYPES)}")
    shape, offsets = _sizes(value["shape"]), _sizes(value["data_offsets"])
    if shape is None or len(shape) > MAX_RANK or offsets is None or len(offsets) != 2:
        raise invalid(f"{_shown(name)}: shape and data_offsets are lists of whole numbers, 8 and 2 at most")
    begin, end = offsets
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise invalid(f"{_shown(name)}: shape, dtype and number of bytes do not fit together")
    return Entry(dtype, shape, first + begin, end - begin)


def _sizes(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(type(size) is int and 0 <= size < 1 << 63 for size in value):
        return None
    return tuple(value)


def _check_coverage(entries: Mapping[str, Entry], first: int, size: int) -> None:
    end = first
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.byte_count)):
        if entry.start != end:
            raise invalid("its tensors overlap or leave gaps")
        end += entry.byte_count
    if end != size:
        raise invalid(f"its tensors end at byte {end:,} of {size:,}")


def _shown(name: str) -> str:
    return repr(name[:80])
