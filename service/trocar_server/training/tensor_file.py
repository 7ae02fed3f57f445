"""Safetensors files, written and read piece by piece: no second copy of the tensors in memory.

    layout = lay_out(tensors, {"format": "pt"})
    write_durably(path, layout.pieces())            # layout.byte_count bytes
    content = read_tensor_file(path)                # .tensors, .metadata, .sha256

safetensors' own `save_file` makes a copy of everything, does not fsync, and refuses tensors that share memory
(0.8). Files from here open with it; tensors on CUDA, and those with a dtype that the format does not know, do
not get in.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.durable import DamagedError, open_regular
from trocar_server.errors import ServiceError
from trocar_server.spool.header import DTYPE_NAMES

PIECE_BYTES = 1 << 20
"""The most bytes in a piece of a file."""
MAX_HEADER_BYTES = 32 << 20
"""Of a file; each of a model's tensors takes some 150."""

_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_MAX_RANK = 64  # torch's own
_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True)
class Layout:
    """A file before it is written."""

    header: bytes
    """Length and header."""
    tensors: tuple[Tensor, ...]
    """In the order of the file; contiguous, on the CPU."""
    byte_count: int
    """Of the whole file."""

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yield the file's bytes, at most `PIECE_BYTES` at once. A piece shows the tensor's own memory."""
        for start in range(0, len(self.header), PIECE_BYTES):
            yield self.header[start : start + PIECE_BYTES]
        for tensor in self.tensors:
            data = _bytes_of(tensor)
            for start in range(0, data.nbytes, PIECE_BYTES):
                yield data[start : start + PIECE_BYTES]


@dataclass(frozen=True)
class TensorFile:
    """What was read from a file."""

    tensors: dict[str, Tensor]
    """By name, in the order of the file; each owns its memory."""
    metadata: dict[str, str]
    """Texts of the header."""
    byte_count: int
    """Of the whole file."""
    sha256: str
    """Of the whole file, in hex."""


@dataclass(frozen=True)
class _Place:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def lay_out(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Layout:
    """Arrange tensors as a file: wide elements first, so that all are aligned, and then by name.

    Args:
        tensors: By name, on the CPU; what is not contiguous is copied. Two that share memory are both there.
        metadata: Texts for the header.

    Raises:
        ServiceError: `TRAINER_INVALID`, a dtype or the number of tensors does not fit the format.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    plain, end = [], 0
    for name in names:
        tensor = tensors[name].detach().resolve_conj().resolve_neg().contiguous()
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _dtype_name(name, tensor.dtype),
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        plain.append(tensor)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    if len(text) > MAX_HEADER_BYTES:
        raise _unfit(f"{len(names):,} tensors are more than a file takes")
    return Layout(
        len(text).to_bytes(_LENGTH_BYTES, "little") + text, tuple(plain), _LENGTH_BYTES + len(text) + end
    )


def read_tensor_file(path: Path, byte_count: int | None = None) -> TensorFile:
    """Read a file into memory of its own, hashing it on the way.

    Nothing is known to be as it was written before the sha256 has been compared.

    Args:
        path: A file of this machine's own.
        byte_count: Its size, where known; another is refused before anything is read.

    Raises:
        DamagedError: It is no such file.
        OSError: It cannot be read.
    """
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if byte_count is not None and size != byte_count:
            raise DamagedError(f"it has {size:,} bytes, not {byte_count:,}")
        return _read(_Reader(descriptor, size))
    finally:
        os.close(descriptor)


class _Reader:
    """Fills memory from a file and hashes it."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self.hash = hashlib.sha256()
        self._descriptor = descriptor

    def fill(self, target: memoryview) -> None:
        rest = target
        while rest.nbytes:
            count = os.readv(self._descriptor, [rest[:PIECE_BYTES]])
            if not count:
                raise DamagedError("it ends too early")
            self.hash.update(rest[:count])
            rest = rest[count:]

    def take(self, byte_count: int) -> bytes:
        taken = bytearray(byte_count)
        self.fill(memoryview(taken))
        return bytes(taken)


def _read(reader: _Reader) -> TensorFile:
    if reader.size < _LENGTH_BYTES:
        raise DamagedError("it is too short")
    length = int.from_bytes(reader.take(_LENGTH_BYTES), "little")
    if length > min(MAX_HEADER_BYTES, reader.size - _LENGTH_BYTES):
        raise DamagedError("its header is too long")
    metadata, places = _parse(reader.take(length), reader.size - _LENGTH_BYTES - length)
    tensors = {}
    for place in places:
        tensors[place.name] = torch.empty(place.shape, dtype=place.dtype)
        reader.fill(_bytes_of(tensors[place.name]))
    return TensorFile(tensors, metadata, reader.size, reader.hash.hexdigest())


def _parse(text: bytes, data_bytes: int) -> tuple[dict[str, str], list[_Place]]:
    """Read a header: its tensors, in the order of the data, cover all of it without holes."""
    try:
        header = json.loads(text)
        metadata = header.pop(_METADATA, {})
        places = [_place(name, entry) for name, entry in header.items()]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise DamagedError("its header cannot be read") from None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise DamagedError("its header says something else than texts")
    places.sort(key=lambda place: (place.start, place.end))
    end = 0
    for place in places:
        if place.start != end or place.end < place.start:
            raise DamagedError("its tensors overlap or leave holes")
        end = place.end
    if end != data_bytes:
        raise DamagedError("it is longer or shorter than its header says")
    return metadata, places


def _place(name: str, entry: Any) -> _Place:
    dtype, shape, (start, end) = _DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in (*shape, start, end)):
        raise ValueError
    # torch multiplies the sizes other than 0, too, for the strides
    elements = math.prod(shape)
    if len(shape) > _MAX_RANK or math.prod(size or 1 for size in shape) >= 1 << 62:
        raise ValueError
    if elements * dtype.itemsize != end - start:
        raise ValueError
    return _Place(name, dtype, tuple(shape), start, end)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return a contiguous tensor's own memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _dtype_name(name: str, dtype: torch.dtype) -> str:
    if dtype not in DTYPE_NAMES:
        raise _unfit(f"'{name[:80]}' is {dtype}, which files cannot hold")
    return DTYPE_NAMES[dtype]


def _unfit(problem: str) -> ServiceError:
    return ServiceError(ErrorReason.TRAINER_INVALID, f"the trainer cannot be saved: {problem}")
