"""Arrays: `.npy` files, which stay on disk until a row is wanted, or one in memory."""

import hashlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trocar._datasets.sample import Sample, Source
from trocar._datasets.sources.files import printable, stat_fingerprint
from trocar._tensors import Array
from trocar.errors import SourceError

ARRAY_SUFFIX = ".npy"


def npy_source(path: Path, sample_rank: int) -> Source:
    """Return the source of the rows of a `.npy` file; the keys are `x.npy[0]`, `x.npy[1]`, ...

    The file holds uint8 pixels, (height, width, 3) or (batch, height, width, 3), for the server to
    preprocess; or the model's input, one sample or with the batch dimension first. Nothing but its
    header is read.

    Args:
        path: The file.
        sample_rank: How many dimensions one sample of the model's input has.

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
        SourceError: It is no such file.
    """
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise SourceError(f"{path} is no .npy file that can be read: {error}") from error
    except OSError as error:
        raise SourceError(f"{path}: {error.strerror or error}") from error
    if not isinstance(array, np.ndarray):
        raise SourceError(f"{path} is no .npy file that can be read: it is an archive of several arrays")
    return array


def array_source(array: Array, sample_rank: int) -> Source:
    """Return the source of the rows of an array in memory; the keys are the indices.

    Raises:
        SourceError: Its rank fits neither one sample nor a batch.
    """
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
    return array[np.newaxis] if array.ndim == rank else array


def is_pixels(array: Array, ranks: tuple[int, ...] = (3,)) -> bool:
    """Tell whether an array is RGB pixels, which the server preprocesses."""
    return array.dtype == np.uint8 and array.ndim in ranks and array.shape[-1] == 3


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
