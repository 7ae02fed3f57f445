"""Tensor files: safetensors, written and read in pieces, without a second copy of the tensors in memory.

    layout = lay_out(tensors, {"format": "pt"})
    write_durably(path, layout.pieces())            # layout.byte_count bytes
    content = read_tensor_file(path)                # .tensors, .metadata, .sha256

safetensors' own `save_file` makes a copy of everything, does not fsync, and refuses tensors that share memory
(0.8). Files from here open with it; tensors on CUDA, and those with a dtype that the format does not know, do
not get in.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.storage.durable import DamagedError, open_regular
from trocar_server.storage.tensor_bytes import bytes_of
from trocar_server.storage.tensor_header import (
    CODES,
    ITEM_BYTES,
    LENGTH_BYTES,
    HeaderError,
    HeaderLimits,
    describe,
    encode_header,
    header_length,
    parse_header,
)

PIECE_BYTES = 1 << 20
"""The most bytes in a piece of a file."""
MAX_HEADER_BYTES = 32 << 20
"""Of a file; each of a model's tensors takes some 150."""

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
_CODES = {dtype: CODES[name] for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Layout:
    """A file before it is written."""

    header: bytes
    """Header length and header."""
    tensors: tuple[Tensor, ...]
    """In the order of the file; contiguous, on the CPU."""
    byte_count: int
    """Of the whole file."""

    def pieces(self) -> Iterator[bytes | memoryview]:
        """Yield the file's bytes, at most `PIECE_BYTES` at once. A piece is a view of a tensor's memory."""
        for start in range(0, len(self.header), PIECE_BYTES):
            yield self.header[start : start + PIECE_BYTES]
        for tensor in self.tensors:
            data = _bytes_of(tensor)
            for start in range(0, data.nbytes, PIECE_BYTES):
                yield data[start : start + PIECE_BYTES]


@dataclass(frozen=True)
class TensorFile:
    """Content of a file."""

    tensors: dict[str, Tensor]
    """By name, in the order of the file; each owns its memory."""
    metadata: dict[str, str]
    """Texts of the header."""
    byte_count: int
    """Of the whole file."""
    sha256: str
    """Of the whole file, in hex; empty for bytes in memory."""


def lay_out(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Layout:
    """Arrange tensors as a file: wide elements first, so that all are aligned, and then by name.

    Args:
        tensors: By name, on the CPU; what is not contiguous is copied. Two that share memory are both there.
        metadata: Texts for the header.

    Raises:
        ServiceError: `TRAINER_INVALID`, a dtype or the number of tensors does not fit the format.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    described, plain, end = {}, [], 0
    for name in names:
        tensor = tensors[name].detach().resolve_conj().resolve_neg().contiguous()
        start, end = end, end + tensor.numel() * tensor.element_size()
        described[name] = describe(_code(name, tensor.dtype), tensor.shape, start, end)
        plain.append(tensor)
    header = encode_header(described, metadata)
    if len(header) - LENGTH_BYTES > MAX_HEADER_BYTES:
        raise _unfit(f"{len(names):,} tensors are too many for one file")
    return Layout(header, tuple(plain), len(header) + end)


def read_tensor_file(path: Path, byte_count: int | None = None) -> TensorFile:
    """Read a file into memory of its own, hashing it on the way.

    The content is unverified until the sha256 has been compared.

    Args:
        path: A file of this machine's own.
        byte_count: Its size, where known; another is refused before anything is read.

    Raises:
        DamagedError: It is not a valid file.
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


def parse_tensors(data: bytes) -> TensorFile:
    """Read a file's bytes into memory of their own: a message of another process, for example.

    Raises:
        DamagedError: They are no valid file.
    """
    return _read(_MemoryReader(data))


class _Source(Protocol):
    """Where the bytes of a file come from, in order."""

    size: int

    def fill(self, target: memoryview) -> None:
        """Fill memory with the next bytes."""
        ...

    def take(self, byte_count: int) -> bytes:
        """Return the next bytes."""
        ...

    def digest(self) -> str:
        """Return the sha256 of the bytes so far, in hex; empty if none is made."""
        ...


class _MemoryReader:
    """Fills memory from bytes."""

    def __init__(self, data: bytes) -> None:
        self._rest, self.size = memoryview(data), len(data)

    def fill(self, target: memoryview) -> None:
        count = target.nbytes
        if count > self._rest.nbytes:
            raise DamagedError("it ends too early")
        target[:] = self._rest[:count]
        self._rest = self._rest[count:]

    def take(self, byte_count: int) -> bytes:
        taken = bytearray(byte_count)
        self.fill(memoryview(taken))
        return bytes(taken)

    def digest(self) -> str:
        return ""


class _Reader:
    """Fills memory from a file and hashes it."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self._hash = hashlib.sha256()
        self._descriptor = descriptor

    def fill(self, target: memoryview) -> None:
        rest = target
        while rest.nbytes:
            count = os.readv(self._descriptor, [rest[:PIECE_BYTES]])
            if not count:
                raise DamagedError("it ends too early")
            self._hash.update(rest[:count])
            rest = rest[count:]

    def take(self, byte_count: int) -> bytes:
        taken = bytearray(byte_count)
        self.fill(memoryview(taken))
        return bytes(taken)

    def digest(self) -> str:
        return self._hash.hexdigest()


def _read(reader: _Source) -> TensorFile:
    limits = HeaderLimits(header_bytes=MAX_HEADER_BYTES)
    try:
        length = header_length(reader.take(min(LENGTH_BYTES, reader.size)), reader.size, limits)
        header = parse_header(reader.take(length), reader.size, limits)
    except HeaderError as error:
        raise DamagedError(str(error)) from None
    tensors = {}
    for name, entry in sorted(header.tensors.items(), key=lambda pair: (pair[1].start, pair[1].byte_count)):
        tensors[name] = torch.empty(entry.shape, dtype=_DTYPES[entry.dtype])
        reader.fill(_bytes_of(tensors[name]))
    return TensorFile(tensors, header.metadata, reader.size, reader.digest())


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return a contiguous tensor's own memory."""
    return bytes_of(tensor).numpy().data


def _code(name: str, dtype: torch.dtype) -> str:
    if dtype not in _CODES:
        raise _unfit(f"'{name[:80]}' is {dtype}, which files cannot hold")
    return _CODES[dtype]


def _unfit(problem: str) -> ServiceError:
    return ServiceError(ErrorReason.TRAINER_INVALID, f"the trainer cannot be saved: {problem}")
