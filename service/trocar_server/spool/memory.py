"""Memory for direct I/O, and the bytes of storages, without torch on other threads.

# Note: [Huge pages and recycling]
A fresh buffer costs a page fault for every 4 KiB, and the kernel must look up each of those pages for direct
I/O: reads ran at 0.9 GB/s into fresh small pages, at 2.5 GB/s into fresh huge ones, at 3.4 GB/s into huge
ones used before, with a twentieth of the processor time (`python -m benchmarks.spool_io`). So buffers ask for
huge pages, and come back here when the tensors over them are gone.
"""

import contextlib
import ctypes
import mmap
import threading
import weakref
from collections import deque

import numpy as np
import torch
from numpy.typing import NDArray

PAGE_BYTES = 4096
_HUGE_BYTES = 2 << 20
_STEP_BYTES = 64 << 10

Bytes = NDArray[np.uint8]


def padded(byte_count: int) -> int:
    """Round up to whole pages."""
    return -(-byte_count // PAGE_BYTES) * PAGE_BYTES


def aligned(byte_count: int) -> tuple[Bytes, int]:
    """Return memory with an aligned stretch of that size in it, and where the stretch begins."""
    raw = np.zeros(byte_count + PAGE_BYTES, np.uint8)
    return raw, -raw.ctypes.data % PAGE_BYTES


def storage_bytes(storage: torch.UntypedStorage, byte_count: int) -> memoryview:
    """View the bytes of a storage in host memory; the storage must outlive the view."""
    pointer = ctypes.cast(storage.data_ptr(), ctypes.POINTER(ctypes.c_uint8 * byte_count))
    return memoryview(pointer.contents).cast("B")


def as_storage(buffer: Bytes) -> torch.UntypedStorage:
    """Return the storage over a buffer, which lives as long as the storage."""
    return torch.from_numpy(buffer).untyped_storage()


class BufferPool:
    """Lends page-aligned buffers, and takes them back when the last array and storage over them is gone.

    Args:
        most_bytes: The most that are kept for later.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._returned: deque[tuple[mmap.mmap, int]] = deque()  # from finalizers, which must take no lock
        self._free: dict[int, list[mmap.mmap]] = {}
        self._free_bytes = 0
        self._lock = threading.Lock()

    def take(self, byte_count: int) -> tuple[Bytes, int]:
        """Return a buffer and where its aligned stretch of at least `byte_count` bytes begins."""
        size = -(-max(byte_count, 1) // _STEP_BYTES) * _STEP_BYTES
        with self._lock:
            self._sort()
            known = self._free.get(size)
            memory = known.pop() if known else None
            self._free_bytes -= size if memory is not None else 0
        if memory is None:
            memory = _new(size)
        array = np.frombuffer(memory, np.uint8)
        weakref.finalize(array, self._returned.append, (memory, size)).atexit = False
        return array, -array.ctypes.data % (_HUGE_BYTES if size >= _HUGE_BYTES else PAGE_BYTES)

    def clear(self) -> None:
        """Give the memory back."""
        with self._lock:
            self._sort()
            self._free.clear()
            self._free_bytes = 0

    def _sort(self) -> None:
        while self._returned:
            memory, size = self._returned.popleft()
            if self._free_bytes + size <= self._most_bytes:
                self._free.setdefault(size, []).append(memory)
                self._free_bytes += size


def _new(size: int) -> mmap.mmap:
    is_large = size >= _HUGE_BYTES
    memory = mmap.mmap(
        -1, size + (_HUGE_BYTES if is_large else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    if is_large and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
