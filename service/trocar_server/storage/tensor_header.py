"""Header of a safetensors file: dtypes, shapes and byte ranges of its tensors; free of torch.

    header = read_header(descriptor, HeaderLimits(header_bytes=1 << 20))
    header.tensors["weight"].start                  # every byte belongs to exactly one tensor
    encode_header({"weight": describe("F32", (3,), 0, 12)}, {"format": "pt"})

Layout: 8 bytes with the length of the header, little-endian; the header, JSON; the bytes of the tensors.
Source: huggingface.co/docs/safetensors, "Format". Read with Python's own JSON and integers alone: files may
come from strangers.
"""

import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

LENGTH_BYTES = 8
"""Of the number with which a file begins."""

_DTYPES = (
    ("F64", "float64", 8),
    ("I64", "int64", 8),
    ("F32", "float32", 4),
    ("I32", "int32", 4),
    ("F16", "float16", 2),
    ("BF16", "bfloat16", 2),
    ("I16", "int16", 2),
    ("I8", "int8", 1),
    ("U8", "uint8", 1),
    ("BOOL", "bool", 1),
    ("U64", "uint64", 8),
    ("U32", "uint32", 4),
    ("U16", "uint16", 2),
    ("C64", "complex64", 8),
    ("F8_E4M3", "float8_e4m3fn", 1),
    ("F8_E5M2", "float8_e5m2", 1),
    ("F8_E4M3FNUZ", "float8_e4m3fnuz", 1),
    ("F8_E5M2FNUZ", "float8_e5m2fnuz", 1),
)
CODES = {name: code for code, name, _ in _DTYPES}
"""The format's code of a dtype, by torch's name without `torch.`: what its reader for torch knows (0.8)."""
NAMES = {code: name for code, name, _ in _DTYPES}
"""Torch's name by the format's code."""
ITEM_BYTES = {name: item_bytes for _, name, item_bytes in _DTYPES}
"""Bytes of one element, by torch's name."""

_METADATA = "__metadata__"
_MAX_ELEMENTS = 1 << 62  # torch multiplies the sizes other than 0, too, for the strides


class HeaderError(ValueError):
    """A header that is invalid, over a limit, or does not fit its file."""


@dataclass(frozen=True)
class HeaderLimits:
    """Limits of a header that is read."""

    header_bytes: int
    """The most bytes of the JSON."""
    tensors: int | None = None
    """The most tensors; None for no limit."""
    rank: int = 64
    """The most dimensions of a tensor; the default is torch's own limit."""
    dtypes: Collection[str] = frozenset(ITEM_BYTES)
    """Torch's names of dtypes that are accepted."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    dtype: str
    """Torch's name, for example `float32`."""
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


@dataclass(frozen=True)
class Header:
    """A header that fits its file."""

    tensors: dict[str, Entry]
    """By name, in the order of the header."""
    metadata: dict[str, str]
    """Texts by key."""


def read_header(descriptor: int, limits: HeaderLimits) -> Header:
    """Read the header of an open file.

    Raises:
        HeaderError: It is invalid, over a limit, or does not fit the file.
        OSError: It cannot be read.
    """
    size = os.fstat(descriptor).st_size
    length = header_length(os.pread(descriptor, LENGTH_BYTES, 0), size, limits)
    return parse_header(os.pread(descriptor, length, LENGTH_BYTES), size, limits)


def header_length(prefix: bytes, size: int, limits: HeaderLimits) -> int:
    """Return the bytes of a header, given the first `LENGTH_BYTES` of its file and the size of the file.

    Raises:
        HeaderError: They are over the limit or beyond the end of the file.
    """
    length = int.from_bytes(prefix, "little")
    if size < LENGTH_BYTES or not 2 <= length <= min(limits.header_bytes, size - LENGTH_BYTES):
        raise HeaderError(f"its header has to be of 2 to {limits.header_bytes:,} bytes and within the file")
    return length


def parse_header(text: bytes, size: int, limits: HeaderLimits) -> Header:
    """Parse a header; every byte of the file belongs to exactly one tensor.

    Args:
        text: Its JSON, with the padding.
        size: Size of the whole file in bytes.
        limits: Limits that it must keep.

    Raises:
        HeaderError: It is invalid, over a limit, or does not fit the file.
    """
    described = _parsed(text)
    metadata = described.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise HeaderError("the metadata of its header has values that are not texts")
    if limits.tensors is not None and not 0 < len(described) <= limits.tensors:
        raise HeaderError(f"it has {len(described):,} tensors; 1 to {limits.tensors:,} can be")
    first = LENGTH_BYTES + len(text)
    entries = {name: _entry(name, value, first, limits) for name, value in described.items()}
    _check_coverage(entries, first, size)
    return Header(entries, metadata)


def describe(code: str, shape: Collection[int], start: int, end: int) -> dict[str, object]:
    """Return the JSON of one tensor.

    Args:
        code: The format's code of its dtype.
        shape: All dimensions.
        start: Where its bytes begin, from the end of the header.
        end: Where they end, likewise.
    """
    return {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}


def encode_header(
    tensors: Mapping[str, object], metadata: Mapping[str, str] | None = None, byte_count: int | None = None
) -> bytes:
    """Return the beginning of a file, up to the data.

    Args:
        tensors: What `describe` returned, by name.
        metadata: Texts by key.
        byte_count: Of the result; padded with spaces, as the format allows. Aligned to 8 bytes when None.
    """
    header = {_METADATA: dict(metadata), **tensors} if metadata else dict(tensors)
    text = json.dumps(header, separators=(",", ":")).encode()
    padded = len(text) + -len(text) % LENGTH_BYTES if byte_count is None else byte_count - LENGTH_BYTES
    return padded.to_bytes(LENGTH_BYTES, "little") + text.ljust(padded)


def _parsed(text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise HeaderError("its header is not JSON, or names a tensor twice") from None
    if not isinstance(value, dict):
        raise HeaderError("its header is not a JSON object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a key appears twice")
    return unique


def _entry(name: str, value: object, first: int, limits: HeaderLimits) -> Entry:
    if not isinstance(value, Mapping) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(f"{_shown(name)} needs dtype, shape and data_offsets, nothing else")
    dtype = NAMES.get(value["dtype"]) if isinstance(value["dtype"], str) else None
    if dtype is None or dtype not in limits.dtypes:
        codes = ", ".join(code for code, name, _ in _DTYPES if name in limits.dtypes)
        raise HeaderError(f"{_shown(name)} has a dtype other than {codes}")
    shape, offsets = _sizes(value["shape"]), _sizes(value["data_offsets"])
    if shape is None or len(shape) > limits.rank or offsets is None or len(offsets) != 2:
        raise HeaderError(
            f"{_shown(name)}: shape and data_offsets are lists of whole numbers, {limits.rank} and 2 at most"
        )
    begin, end = offsets
    is_too_large = math.prod(size or 1 for size in shape) >= _MAX_ELEMENTS
    if is_too_large or end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise HeaderError(f"{_shown(name)}: shape, dtype and number of bytes do not match")
    return Entry(dtype, shape, first + begin, end - begin)


def _sizes(value: object) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(type(size) is int and 0 <= size < 1 << 63 for size in value):
        return None
    return tuple(value)


def _check_coverage(entries: Mapping[str, Entry], first: int, size: int) -> None:
    end = first
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.byte_count)):
        if entry.start != end:
            raise HeaderError("its tensors overlap or leave gaps")
        end += entry.byte_count
    if end != size:
        raise HeaderError(f"its tensors end at byte {end:,} of {size:,}")


def _shown(name: str) -> str:
    return repr(name[:80])
