"""Rows of features, one for each sample: in memory as far as that goes, the rest in a file without a name.

    store = FeatureStore(layouts, count=1797, memory_bytes=1 << 30, disk_bytes=0, scratch_dir=folder)
    store.write(indices, values)
    rows = store.read(indices)

The file has no name from the first moment on: when the process ends, however it ends, it is gone. Its blocks
are allocated before anything is written, because whoever writes to mapped memory learns of a full disk by a
signal that ends the process.
"""

import errno
import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


class NoRoomError(Exception):
    """The features do not fit; says how many bytes there are and what is missing."""


@dataclass(frozen=True)
class Layout:
    """How a value lies in memory, which decides which kernels take it.

    Attributes:
        shape: Of the value, batch first.
        stride: Elements from one index to the next in each dimension.
        offset: Elements before the first one.
        dtype: Of its elements.
        device: Where it is.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, value: Tensor) -> "Layout":
        """Return a value's layout."""
        offset = int(value.storage_offset())
        return cls(tuple(value.shape), value.stride(), offset, value.dtype, value.device)

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def is_plain(self) -> bool:
        """Whether a new tensor would lie in the same way."""
        dense = [math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        return not self.offset and list(self.stride) == dense

    def laid_out(self, rows: Tensor) -> Tensor:
        """Return rows, (batch, ...) one behind the other, as a value of this layout on its device."""
        rows = rows.to(self.device)
        if self.is_plain:
            return rows
        reach = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        memory = torch.empty(self.offset + reach + 1, dtype=self.dtype, device=self.device)
        return memory.as_strided(self.shape, self.stride, self.offset).copy_(rows)


class FeatureStore:
    """One row of each value for each sample.

    Args:
        layouts: Of the values.
        count: Samples.
        memory_bytes: At most so many bytes in memory.
        disk_bytes: At most so many in the file.
        scratch_dir: Folder for the file.

    Attributes:
        byte_count: Of all rows.
        disk_byte_count: Of those in the file.

    Raises:
        NoRoomError: It is more than both together, or than the disk has.
    """

    def __init__(
        self, layouts: Sequence[Layout], count: int, memory_bytes: int, disk_bytes: int, scratch_dir: Path
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
        """Keep rows of samples; `indices` is int64 (n,), values have n rows."""
        here, there = self._places(indices)
        for position, value in enumerate(values):
            rows = value.detach().cpu()
            self._memory[position][indices[here]] = rows[here]
            if self._disk:
                self._disk[position][indices[there] - self._split] = rows[there]

    def read(self, indices: Tensor) -> list[Tensor]:
        """Return the rows of samples, in new memory."""
        if not self._disk:
            return [torch.index_select(rows, 0, indices) for rows in self._memory]
        here, there = self._places(indices)
        result = []
        for memory, disk in zip(self._memory, self._disk, strict=True):
            rows = torch.empty((len(indices), *memory.shape[1:]), dtype=memory.dtype)
            rows[here] = memory[indices[here]]
            rows[there] = disk[indices[there] - self._split]
            result.append(rows)
        return result

    def close(self) -> None:
        """Free memory and disk."""
        self._memory, self._disk = [], []

    def _places(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        here = indices < self._split
        return here, ~here


def _mapped(layouts: Sequence[Layout], count: int, folder: Path) -> list[Tensor]:
    """Return a tensor (count, ...) for each layout, all of them in one file that has no name."""
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
        why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
        raise NoRoomError(f"{sum(sizes):,} bytes of features cannot lie on disk: {why}") from None
    tensors, offset = [], 0
    for layout, size in zip(layouts, aligned, strict=True):
        elements = math.prod((count, *layout.shape[1:]))
        flat = torch.frombuffer(memory, dtype=layout.dtype, count=elements, offset=offset)
        tensors.append(flat.reshape((count, *layout.shape[1:])))
        offset += size
    return tensors
