"""Where samples come from: shards of a data set, or the operator's folder. Knows no torch."""

import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.datasets.disk import disk_errors
from trocar_server.training.datasets.form import ArrayForm, SampleForm, TargetForm
from trocar_server.training.datasets.header import Entry, read_header
from trocar_server.training.datasets.inspection import (
    IMAGES,
    INPUTS,
    OFFSETS,
    TARGETS,
    read_exactly,
    sample_count_of,
)
from trocar_server.training.datasets.store import StoredShard

Array = NDArray[Any]

_MAX_OPEN = 32
_MAX_IMAGE_BYTES = 256 << 20


@dataclass(frozen=True)
class RawSamples:
    """Some samples as they are stored; bfloat16 as its bits in uint16."""

    indices: tuple[int, ...]
    """Which samples of the data set."""
    inputs: Array | list[bytes]
    """(samples, ...); or encoded images."""
    targets: Mapping[str, Array]
    """(samples, ...) by name."""


class SampleSource(Protocol):
    """Where samples come from. Any thread may ask."""

    form: SampleForm
    """What they look like."""

    def __len__(self) -> int:
        """Return how many there are."""
        ...

    def read(self, indices: Sequence[int]) -> RawSamples:
        """Return samples, in the order asked for."""
        ...

    def close(self) -> None:
        """Let go of files."""
        ...


class ShardSource:
    """The samples of shards. Each shard is compared with its sha256 before its first sample is read.

    Rows are read one by one, never mapped into memory: a file that is cut off is an error here, and would be
    the end of the process there.

    Args:
        shards: In order.
        form: What the samples look like.
    """

    def __init__(self, shards: Sequence[StoredShard], form: SampleForm) -> None:
        self.form = form
        self._shards = shards
        self._ends = np.array([*accumulate(stored.shard.sample_count for stored in shards)])
        self._open: OrderedDict[int, _OpenShard] = OrderedDict()
        self._checked: set[int] = set()
        self._lock = Lock()

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, indices: Sequence[int]) -> RawSamples:
        """Return samples, in the order asked for.

        Raises:
            ServiceError: `DATASET_CORRUPT` or `STORAGE_UNAVAILABLE`.
            IndexError: There is no such sample.
        """
        images: list[bytes] = []
        count, form = len(indices), self.form
        inputs = None if form.inputs is None else empty(form.inputs, count)
        targets = {name: empty(target, count) for name, target in form.targets.items()}
        with self._lock, disk_errors():
            for position, index in enumerate(indices):
                shard, row = self._find(index)
                if inputs is None:
                    images.append(shard.image(row))
                else:
                    shard.read_row(INPUTS, row, inputs[position])
                for name, array in targets.items():
                    shard.read_row(f"{TARGETS}.{name}" if name else TARGETS, row, array[position, ...])
        return RawSamples(tuple(indices), images if inputs is None else inputs, targets)

    def close(self) -> None:
        """Close files."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def _find(self, index: int) -> tuple["_OpenShard", int]:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no sample {index} of {len(self)}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[number - 1]) if number else 0
        return self._opened(number), index - first

    def _opened(self, number: int) -> "_OpenShard":
        found = self._open.get(number)
        if found is None:
            stored = self._shards[number]
            if number not in self._checked:
                stored.check()
                self._checked.add(number)
            found = self._open[number] = _OpenShard(stored)
            if len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(number)
        return found


class _OpenShard:
    def __init__(self, stored: StoredShard) -> None:
        self._descriptor = os.open(stored.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._entries: Mapping[str, Entry] = read_header(self._descriptor)
            sample_count_of(self._entries)
        except BaseException:
            os.close(self._descriptor)
            raise

    def read_row(self, name: str, row: int, out: Array) -> None:
        """Fill an array with one sample of a tensor."""
        entry = self._entries[name]
        data = read_exactly(self._descriptor, entry.start + row * entry.row_bytes, entry.row_bytes)
        out[...] = np.frombuffer(data, out.dtype).reshape(out.shape)

    def image(self, row: int) -> bytes:
        """Return the bytes of one image."""
        images, offsets = self._entries[IMAGES], self._entries[OFFSETS]
        pair = np.frombuffer(read_exactly(self._descriptor, offsets.start + 8 * row, 16), "<i8")
        return read_exactly(self._descriptor, images.start + int(pair[0]), int(pair[1]) - int(pair[0]))

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class FolderSource:
    """The images of a folder of class folders, read when they are wanted.

    Args:
        root: The folder.
        files: Relative paths, in order.
        labels: The class of each.
    """

    def __init__(self, root: Path, files: Sequence[str], labels: NDArray[np.int64]) -> None:
        self._root = root
        self._files = files
        self._labels = labels
        classes = tuple(np.unique(labels).tolist())
        target = TargetForm("int64", (), classes[0], classes[-1], classes)
        self.form = SampleForm(None, {"": target})

    def __len__(self) -> int:
        return len(self._files)

    def read(self, indices: Sequence[int]) -> RawSamples:
        """Return samples, in the order asked for.

        Raises:
            ServiceError: `DATASET_CORRUPT`, a file is not there any more or is too large.
            IndexError: There is no such sample.
        """
        images = [self._read(index) for index in indices]
        return RawSamples(tuple(indices), images, {"": self._labels[np.asarray(indices, np.int64)]})

    def close(self) -> None:
        """Do nothing: files are open only while they are read."""

    def _read(self, index: int) -> bytes:
        if not 0 <= index < len(self):
            raise IndexError(f"there is no sample {index} of {len(self)}")
        try:
            with (self._root / self._files[index]).open("rb") as file:
                data = file.read(_MAX_IMAGE_BYTES + 1)
        except OSError:
            data = b""
        if not 0 < len(data) <= _MAX_IMAGE_BYTES:
            raise ServiceError(
                ErrorReason.DATASET_CORRUPT,
                f"sample {index} of the operator's data set cannot be read any more; its operator has to see "
                "to that",
            )
        return data


def empty(form: ArrayForm | TargetForm, count: int) -> Array:
    """Return an array for so many samples, with no values yet."""
    name = "uint16" if form.dtype == "bfloat16" else form.dtype
    return np.empty((count, *form.shape), np.dtype(name).newbyteorder("<"))
