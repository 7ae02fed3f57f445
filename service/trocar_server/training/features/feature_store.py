"""Feature store: one row per sample, in memory up to a budget, the rest in an unnamed file.

    store = FeatureStore(layouts, count=1797, memory_bytes=1 << 30, disk_bytes=0, scratch_dir=folder)
    store.write(indices, values)
    rows = store.read(indices)

The file is unlinked from the start, so that it disappears when the process ends, for whatever reason. Its
blocks are allocated before anything is written, because a full disk turns a write to mapped memory into a
signal that kills the process.
"""

import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trocar_server.storage.durable import is_disk_full


class NoRoomError(Exception):
    """The features do not fit; the message has their bytes and the missing bytes."""


@dataclass(frozen=True)
class MemoryLayout:
    """Memory layout of a value, which affects the choice of kernels.

    Attributes:
        shape: Shape of the value, batch first.
        stride: Elements from one index to the next in each dimension.
        offset: Elements before the first one.
        dtype: Dtype of its elements.
        device: Its device.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: Tensor) -> "MemoryLayout":
        """Return a value's layout."""
        offset = int(value.storage_offset())
        return cls(tuple(value.shape), value.stride(), offset, value.dtype, value.device)

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def is_plain(self) -> bool:
        """Whether a new tensor would have the same layout."""
        dense = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        return not self.offset and list(self.stride) == dense

    def laid_out(self, rows: Tensor) -> Tensor:
        """Return contiguous rows, (batch, ...), as a value of this layout on its device."""
        rows = rows.to(self.device)
        if self.is_plain:
            return rows
        reach = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        memory = torch.empty(self.offset + reach + 1, dtype=self.dtype, device=self.device)
        return memory.as_strided(self.shape, self.stride, self.offset).copy_(rows)


class FeatureStore:
    """One row of each value for each sample.

    Args:
        layouts: Layouts of the values.
        count: Number of samples.
        memory_bytes: The most bytes in memory.
        disk_bytes: The most bytes in the file.
        scratch_dir: Folder for the file.

    Attributes:
        byte_count: Bytes of all rows.
        disk_byte_count: Bytes of the rows in the file.

    Raises:
        NoRoomError: The rows exceed both budgets together, or the free disk space.
    """

    def __init__(
        self,
        layouts: Sequence[MemoryLayout],
        count: int,
        memory_bytes: int,
        disk_bytes: int,
        scratch_dir: Path,
    ) -> None:
        row_bytes = sum(layout.row_bytes for layout in layouts)
        self.byte_count = row_bytes * count
        self._split = min(count, memory_bytes // max(row_bytes, 1))
        self.disk_byte_count = row_bytes * (count - self._split)
        if self.disk_byte_count > disk_bytes:
            raise NoRoomError(
                f"the features have {self.byte_count:,} bytes; the budgets are {memory_bytes:,} bytes in "
                f"memory and {disk_bytes:,} on disk"
            )
        self._memory = [
            torch.empty((self._split, *layout.shape[1:]), dtype=layout.dtype) for layout in layouts
        ]
        self._disk = _mapped(layouts, count - self._split, scratch_dir)

    def write(self, indices: Tensor, values: Sequence[Tensor]) -> None:
        """Store rows of samples; `indices` is int64 (n,), values have n rows."""
        in_memory, on_disk = self._places(indices)
        for position, value in enumerate(values):
            rows = value.detach().cpu()
            self._memory[position][indices[in_memory]] = rows[in_memory]
            if self._disk:
                self._disk[position][indices[on_disk] - self._split] = rows[on_disk]

    def read(self, indices: Tensor) -> list[Tensor]:
        """Return the rows of samples, in new memory."""
        if not self._disk:
            return [torch.index_select(rows, 0, indices) for rows in self._memory]
        in_memory, on_disk = self._places(indices)
        result = []
        for memory, disk in zip(self._memory, self._disk, strict=True):
            rows = torch.empty((len(indices), *memory.shape[1:]), dtype=memory.dtype)
            rows[in_memory] = memory[indices[in_memory]]
            rows[on_disk] = disk[indices[on_disk] - self._split]
            result.append(rows)
        return result

    def close(self) -> None:
        """Free memory and disk."""
        self._memory, self._disk = [], []

    def _places(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        in_memory = indices < self._split
        return in_memory, ~in_memory


def _mapped(layouts: Sequence[MemoryLayout], count: int, folder: Path) -> list[Tensor]:
    """Return a tensor (count, ...) for each layout, all of them in one unlinked file."""
    sizes = [layout.row_bytes * count for layout in layouts]
    aligned = [-(-size // mmap.PAGESIZE) * mmap.PAGESIZE for size in sizes]
    if not sum(aligned):
        return []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, sum(aligned))
            memory = mmap.mmap(file.fileno(), sum(aligned))
    except OSError as error:
        why = "the disk is full" if is_disk_full(error) else error.strerror
        raise NoRoomError(f"{sum(sizes):,} bytes of features cannot be stored on disk: {why}") from None
    tensors, offset = [], 0
    for layout, size in zip(layouts, aligned, strict=True):
        elements = math.prod((count, *layout.shape[1:]))
        flat = torch.frombuffer(memory, dtype=layout.dtype, count=elements, offset=offset)
        tensors.append(flat.reshape((count, *layout.shape[1:])))
        offset += size
    return tensors
