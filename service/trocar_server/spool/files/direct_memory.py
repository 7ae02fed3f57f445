"""Aligned memory for direct I/O, and raw access to storages, without calling torch on other threads.

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

from trocar_server.spool.freed_memory import freed_memory

PAGE_BYTES = 4096
_HUGE_BYTES = 2 << 20
_SLAB_BYTES = 4 << 20
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
    """Recycles page-aligned buffers, after the last array and storage over them is gone.

    Args:
        most_bytes: The most that are kept for later, less what is lent meanwhile.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._returned: deque[Bytes] = deque()  # from finalizers, which must take no lock
        self._free: dict[int, list[Bytes]] = {}
        self._free_bytes = self._lent_bytes = 0

    def take(self, phase: int, byte_count: int) -> tuple[memoryview, Bytes]:
        """Return whole pages, and `byte_count` bytes in them, `phase` behind the begin of the first.

        The pages are in use for as long as these bytes are referenced. Their content is undefined.
        """
        page_bytes = padded(phase + byte_count)
        if freed_memory() is not None:  # whose heap has huge pages, and uses them again for any tensor
            return _from_heap(page_bytes, phase, byte_count)
        size = -(-max(page_bytes, 1) // _STEP_BYTES) * _STEP_BYTES
        with self._lock:
            self._sort()
            if not self._free.get(size):
                self._make_room(size)
                self._add(_slab(size))
            slot = self._free[size].pop()
            self._free_bytes -= size
            self._lent_bytes += size
        # Its end says that the slot is free. No view of it may be given on: views hold the slab only.
        lent = slot[phase : phase + byte_count]
        weakref.finalize(lent, self._returned.append, slot).atexit = False
        return slot.data[:page_bytes], lent

    def clear(self) -> None:
        """Free unused memory."""
        with self._lock:
            self._sort()
            self._free.clear()
            self._free_bytes = 0

    def _sort(self) -> None:
        while self._returned:
            slot = self._returned.popleft()
            self._lent_bytes -= slot.nbytes
            if self._lent_bytes + self._free_bytes + slot.nbytes <= self._most_bytes:
                self._add([slot])

    def _make_room(self, byte_count: int) -> None:
        """Free memory of other sizes, the oldest size first."""
        while self._free and self._lent_bytes + self._free_bytes + byte_count > self._most_bytes:
            size = next(iter(self._free))
            slots = self._free[size]
            if slots:
                slots.pop()
                self._free_bytes -= size
            if not slots:
                del self._free[size]

    def _add(self, slots: list[Bytes]) -> None:
        for slot in slots:
            self._free.setdefault(slot.nbytes, []).append(slot)
            self._free_bytes += slot.nbytes


def _from_heap(page_bytes: int, phase: int, byte_count: int) -> tuple[memoryview, Bytes]:
    raw = np.empty(page_bytes + PAGE_BYTES, np.uint8)
    pages = raw[-raw.ctypes.data % PAGE_BYTES :][:page_bytes]
    return pages.data, pages[phase : phase + byte_count]


def _slab(size: int) -> list[Bytes]:
    """Map fresh memory for buffers of a size: one large one, or several that share huge pages."""
    count = max(_SLAB_BYTES // size, 1)
    memory = mmap.mmap(-1, count * size + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % _HUGE_BYTES
    return [whole[at : at + size] for at in range(start, start + count * size, size)]
