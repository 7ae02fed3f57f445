"""Arrays: `.npy` files, which stay on disk until a row is wanted, or one in memory."""

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trocar._base.input_kinds import is_pixels
from trocar._base.names import shortened
from trocar._base.tensors import WIRE_DTYPES, Array, check_sendable, float_array
from trocar._sources.files import check_regular, printable, stat_fingerprint
from trocar._sources.sample import Sample, Source
from trocar.errors import SourceError

ARRAY_SUFFIX = ".npy"
_MAX_HEADER_BYTES = 10_000
"""Of a `.npy` file: what NumPy parses. It reads longer ones, up to 4 GiB, and then refuses them."""


def npy_source(path: Path, sample_rank: int) -> Source:
    """Return the source of the rows of a `.npy` file; the keys are `x.npy[0]`, `x.npy[1]`, ...

    The file holds uint8 pixels, (height, width, 3) or (batch, height, width, 3), for the server to
    preprocess; or the model's input, one sample or with the batch dimension first. Only its
    header is read.

    Args:
        path: The file.
        sample_rank: Number of dimensions of one sample of the model's input.

    Raises:
        SourceError: It is no such file, or its rank fits neither one sample nor a batch.
    """
    array = open_npy(path)
    name = printable(str(path))
    rows = as_batch(array, sample_rank, str(path))
    is_one = rows.ndim > array.ndim
    fingerprint = stat_fingerprint([(name, path)])
    return _source(rows, name, fingerprint, lambda index: name if is_one else f"{name}[{index}]")


def open_npy(path: Path) -> Array:
    """Map a `.npy` file into memory; pickled objects are never read.

    Raises:
        SourceError: It is no such file, or its contents fit no model.
    """
    check_regular(path)
    try:
        with path.open("rb") as file:
            _check_header(path, file)
        array: Array = np.load(path, mmap_mode="r", allow_pickle=False)
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror or error}") from error
    except SourceError:
        raise
    except Exception as error:  # the header is Python text: ValueError, TypeError, RecursionError, ...
        raise _unreadable(path, shortened(error) or type(error).__name__) from error
    if array.dtype.name not in WIRE_DTYPES:
        raise SourceError(f"{path} holds {shortened(array.dtype)}; save one of {', '.join(WIRE_DTYPES)}")
    return array


def _check_header(path: Path, file: BinaryIO) -> None:
    """Reject headers that NumPy would accept or misread, before NumPy parses them."""
    begin = file.read(12)
    if begin.startswith(b"PK"):
        raise _unreadable(path, "it is an archive of several arrays; save one of them with np.save")
    if begin.startswith(np.lib.format.MAGIC_PREFIX) and begin[6:7] > b"\1":  # since 2.0 of four bytes
        length = int.from_bytes(begin[8:12], "little")
        if length > _MAX_HEADER_BYTES:
            raise _unreadable(path, f"a header of {length:,} bytes; the limit is {_MAX_HEADER_BYTES:,}")


def _unreadable(path: Path, why: str) -> SourceError:
    return SourceError(f"{path} is not a readable .npy file: {why}")


def array_source(array: Array, sample_rank: int) -> Source:
    """Return the source of the rows of an array in memory; the keys are the indices.

    Raises:
        SourceError: Its rank fits neither one sample nor a batch, or it has a dtype that cannot be sent.
    """
    try:
        array = float_array(array)
        check_sendable(array, array.dtype.name)
    except TypeError as error:
        raise SourceError(str(error)) from error
    rows = as_batch(array, sample_rank, "the array")
    return _source(rows, "", hashlib.sha256(np.ascontiguousarray(array).data).hexdigest(), str)


def as_batch(array: Array, sample_rank: int, name: str) -> Array:
    """View an array with the batch dimension first, whether it is one sample or a batch.

    Raises:
        SourceError: The rank fits neither.
    """
    rank = 3 if is_pixels(array, ranks=(3, 4)) else sample_rank
    if array.ndim not in (rank, rank + 1):
        raise SourceError(
            f"{name} has shape {array.shape}; one sample has {rank} dimensions, a batch {rank + 1}"
        )
    rows = array[np.newaxis] if array.ndim == rank else array
    if len(rows) and not rows.size:
        raise SourceError(f"{name} has shape {array.shape}: its samples are empty")
    return rows


def _source(rows: Array, name: str, fingerprint: str, key: Callable[[int], str]) -> Source:
    def samples(start: int) -> Iterator[Sample]:
        for index in range(start, len(rows)):
            yield Sample(key(index), partial(np.array, rows[index]), (index + 1) / len(rows))

    description: dict[str, Any] = {
        "kind": "array",
        "name": name,
        "count": len(rows),
        "shape": list(rows.shape[1:]),
        "dtype": str(rows.dtype),
        "fingerprint": fingerprint,
    }
    return Source(description, samples, len(rows))
