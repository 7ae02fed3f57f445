"""Sample sources: a data set's shards, or the operator's folder. Free of torch."""

import json
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.storage.disk_errors import disk_errors
from trocar_server.storage.tensor_header import Entry
from trocar_server.training.datasets.dataset_schema import ArraySignature, SampleSignature, TargetSignature
from trocar_server.training.datasets.inspection import (
    INPUTS,
    OFFSETS,
    TARGETS,
    encoded_name,
    read_exactly,
    sample_count_of,
    shard_header,
)
from trocar_server.training.datasets.stored_shard import StoredShard

Array = NDArray[Any]

MAX_LOADED_BYTES = 1 << 30
"""The most bytes of samples in memory at once, images decoded."""

_MAX_OPEN = 32
_MAX_IMAGE_BYTES = 256 << 20

FolderKind: TypeAlias = Literal["image", "sound", "text"]
"""What the files of a folder are."""


@dataclass(frozen=True)
class RawSamples:
    """Several samples as stored; bfloat16 as its bits in uint16."""

    indices: tuple[int, ...]
    """Indices of the samples in the data set."""
    inputs: Array | list[bytes]
    """(samples, ...); or encoded images or texts."""
    targets: Mapping[str, Array]
    """(samples, ...) by name."""


class SampleSource(Protocol):
    """A source of samples. Thread-safe."""

    signature: SampleSignature
    """Signature of the samples."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def read(self, indices: Sequence[int]) -> RawSamples:
        """Return samples, in the order of the indices."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


class ShardSource:
    """The samples of shards. Each shard is checked against its sha256 before its first sample is read.

    Rows are read one by one, never memory-mapped: a truncated file raises an error here, while a mapped one
    would crash the process.

    Args:
        shards: In order.
        signature: Signature of the samples.
    """

    def __init__(self, shards: Sequence[StoredShard], signature: SampleSignature) -> None:
        self.signature = signature
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
            ServiceError: `DATASET_CORRUPT` or `STORAGE_UNAVAILABLE`; `FIT_INVALID`, too many bytes at once.
            IndexError: There is no such sample.
        """
        encoded: list[bytes] = []
        byte_count = 0
        count, signature = len(indices), self.signature
        inputs = None if signature.inputs is None else empty(signature.inputs, count)
        targets = {name: empty(target, count) for name, target in signature.targets.items()}
        with self._lock, disk_errors("data set"):
            for position, index in enumerate(indices):
                shard, row = self._find(index)
                if inputs is None:
                    encoded.append(shard.encoded(row))
                    byte_count += len(encoded[-1])
                    if byte_count > MAX_LOADED_BYTES:
                        raise too_many(count)
                else:
                    shard.read_row(INPUTS, row, inputs[position])
                for name, array in targets.items():
                    shard.read_row(f"{TARGETS}.{name}" if name else TARGETS, row, array[position, ...])
        return RawSamples(tuple(indices), encoded if inputs is None else inputs, targets)

    def close(self) -> None:
        """Close files."""
        with self._lock:
            while self._open:
                self._open.popitem()[1].close()

    def _find(self, index: int) -> tuple["_OpenShard", int]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is out of range: there are {len(self)}")
        number = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[number - 1]) if number else 0
        return self._opened(number), index - first

    def _opened(self, number: int) -> "_OpenShard":
        result = self._open.get(number)
        if result is None:
            stored = self._shards[number]
            if number not in self._checked:
                stored.check()
                self._checked.add(number)
            result = self._open[number] = _OpenShard(stored)
            if len(self._open) > _MAX_OPEN:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(number)
        return result


class _OpenShard:
    def __init__(self, stored: StoredShard) -> None:
        self._descriptor = os.open(stored.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._entries: Mapping[str, Entry] = shard_header(self._descriptor)
            sample_count_of(self._entries)
        except BaseException:
            os.close(self._descriptor)
            raise

    def read_row(self, name: str, row: int, out: Array) -> None:
        """Fill an array with one sample of a tensor."""
        entry = self._entries[name]
        data = read_exactly(self._descriptor, entry.start + row * entry.row_bytes, entry.row_bytes)
        out[...] = np.frombuffer(data, out.dtype).reshape(out.shape)

    def encoded(self, row: int) -> bytes:
        """Return the bytes of one image or text."""
        samples, offsets = self._entries[encoded_name(self._entries)], self._entries[OFFSETS]
        pair = np.frombuffer(read_exactly(self._descriptor, offsets.start + 8 * row, 16), "<i8")
        return read_exactly(self._descriptor, samples.start + int(pair[0]), int(pair[1]) - int(pair[0]))

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class FolderSource:
    """The images, sound or texts of a folder with one subfolder per class, read on demand.

    Args:
        root: The folder.
        files: Relative paths, in order.
        labels: The class of each.
        kind: What they are.
    """

    def __init__(
        self, root: Path, files: Sequence[str], labels: NDArray[np.int64], kind: FolderKind = "image"
    ) -> None:
        self._root = root
        self._kind = kind
        self._files = files
        self._labels = labels
        classes = tuple(np.unique(labels).tolist())
        target = TargetSignature("int64", (), classes[0], classes[-1], classes)
        self.signature = SampleSignature(None, {"": target}, is_text=kind == "text", is_sound=kind == "sound")

    def __len__(self) -> int:
        return len(self._files)

    def read(self, indices: Sequence[int]) -> RawSamples:
        """Return samples, in the order asked for.

        Raises:
            ServiceError: `DATASET_CORRUPT`, a file is gone, too large, or a text that is not in UTF-8.
            IndexError: There is no such sample.
        """
        samples = [self._read(index) for index in indices]
        return RawSamples(tuple(indices), samples, {"": self._labels[np.asarray(indices, np.int64)]})

    def close(self) -> None:
        """Do nothing: files are open only while they are read."""

    def _read(self, index: int) -> bytes:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is out of range: there are {len(self)}")
        try:
            with (self._root / self._files[index]).open("rb") as file:
                data = file.read(_MAX_IMAGE_BYTES + 1)
        except OSError:
            data = b""
        if self._kind == "text":
            data = _encoded_text(data)
        if not 0 < len(data) <= _MAX_IMAGE_BYTES:
            raise ServiceError(
                ErrorReason.DATASET_CORRUPT,
                f"sample {index} of the operator's data set cannot be read; ask its operator to "
                "check the folder",
            )
        return data


def _encoded_text(data: bytes) -> bytes:
    """Return the text of a file as shards have it; nothing where it is not in UTF-8."""
    try:
        return json.dumps(data.decode("utf-8-sig"), ensure_ascii=False).encode()
    except UnicodeDecodeError:
        return b""


def empty(signature: ArraySignature | TargetSignature, count: int) -> Array:
    """Return an uninitialised array for `count` samples."""
    name = "uint16" if signature.dtype == "bfloat16" else signature.dtype
    return np.empty((count, *signature.shape), np.dtype(name).newbyteorder("<"))


def too_many(count: int) -> ServiceError:
    """Build the error for a batch that does not fit into memory."""
    return ServiceError(
        ErrorReason.FIT_INVALID,
        f"a batch of {count:,} samples has more than {MAX_LOADED_BYTES:,} bytes; use a smaller batch_size",
    )
