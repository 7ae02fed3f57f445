"""Heaps: the allocators whose freed memory can be counted and returned to the system.

    heap = heap_of_process()                    # None where its allocator is another one
    heap.kept_bytes(resident_bytes())
    heap.trim()

# Note: [Resident free memory]
glibc knows how many bytes are free, but not which of them are resident; the kernel knows how many are
resident, but not which of them are free. Right after a trim no free page is resident, so what is resident
beyond the bytes in use is the rest of the process. What comes to this rest later is free memory, or was
mapped by others; then one trim is made for nothing. tcmalloc knows it by itself.
"""

import ctypes
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

# From malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_DEFAULT_TOP_PAD = 128 << 10
_NEVER_TRIMMED = -1
_HUGE_BYTES = 2 << 20
_RESERVED_BYTES = (1 << 31) - _HUGE_BYTES
"""What the heap grows by, in addresses: the most that `mallopt` accepts, in whole huge pages."""

_LOW_BYTES = 256 << 20
_KEEPS_END = (1 << 63) - 1
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_NEVER = "2"


class HeapCounts(ctypes.Structure):
    """`struct mallinfo2` of glibc, in bytes: `uordblks` in use, `keepcost` free at the heap's end."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


class GlibcHeap:
    """glibc's heap of this process, from which all blocks come from now on.

    Raises:
        OSError: The C library is another one, an allocator was preloaded, or the settings are refused.
        AttributeError: It is older than 2.33.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL("libc.so.6")
        if _address(library.malloc) != _address(ctypes.CDLL(None).malloc):
            raise OSError("the allocator of this process is not glibc's")
        address, size = ctypes.c_void_p, ctypes.c_size_t
        self._counts = _function(library.mallinfo2, HeapCounts)
        self._malloc = _function(library.malloc, address, size)
        self._free = _function(library.free, None, address)
        self._malloc_trim = _function(library.malloc_trim, ctypes.c_int, size)
        self._madvise = _function(library.madvise, ctypes.c_int, address, size, ctypes.c_int)
        self._sbrk = _function(library.sbrk, address, ctypes.c_ssize_t)
        self._mallopt = _function(library.mallopt, ctypes.c_int, ctypes.c_int, ctypes.c_int)
        self._rest_bytes = 0
        self._hold_all_blocks()

    def _used_bytes(self) -> int:
        """Count the bytes of blocks that are in use, in all arenas."""
        counts = self._counts()
        return int(counts.uordblks + counts.hblkhd)

    def kept_bytes(self, resident: int) -> int:
        """Count the bytes that are free and resident; see Note: [Resident free memory].

        Args:
            resident: Bytes of this process that are in memory.
        """
        return resident - self._used_bytes() - self._rest_bytes

    def trim(self) -> None:
        """Return all free pages to the system."""
        self._malloc_trim(_KEEPS_END)
        self._trim_end()
        if _may_use_huge_pages() and self._counts().keepcost < _LOW_BYTES:
            self._reserve()
        self._rest_bytes = resident_bytes() - self._used_bytes()

    def _reserve(self) -> None:
        """Let the heap grow by 2 GiB of addresses, which takes no memory, and request huge pages for them."""
        start = self._sbrk(0)
        self._mallopt(_M_TOP_PAD, _RESERVED_BYTES)
        try:
            self._free(self._malloc(self._counts().keepcost + _HUGE_BYTES))  # larger than what is free there
        finally:
            self._mallopt(_M_TOP_PAD, _DEFAULT_TOP_PAD)
        start, end = -(-start // _HUGE_BYTES) * _HUGE_BYTES, self._sbrk(0)
        if end > start:
            self._madvise(start, end - start, mmap.MADV_HUGEPAGE)

    def _hold_all_blocks(self) -> None:
        """Let large blocks come from the heap, too, and let nothing be returned but by `trim`.

        One arena, because the heap of a thread's own arena holds no block over 64 MiB.
        """
        settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER_TRIMMED), (_M_ARENA_MAX, 1))
        if [self._mallopt(option, value) for option, value in settings] != [1, 1, 1]:
            raise OSError("glibc does not accept the settings")

    def _trim_end(self) -> None:
        """Return the pages behind the last block, but not their addresses, which have huge pages.

        As a block of its own, so that no other thread takes them meanwhile.
        """
        size = self._counts().keepcost - mmap.PAGESIZE
        block = self._malloc(size) if size > _HUGE_BYTES else None
        if block is None:
            return
        start, end = -(-block // mmap.PAGESIZE), (block + size) // mmap.PAGESIZE
        self._madvise(start * mmap.PAGESIZE, (end - start) * mmap.PAGESIZE, mmap.MADV_DONTNEED)
        self._free(block)


class TcmallocHeap:
    """tcmalloc, where it was preloaded: it knows which of its free pages are resident.

    Raises:
        AttributeError: The allocator of this process is another one.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        name, value = ctypes.c_char_p, ctypes.POINTER(ctypes.c_size_t)
        self._property = _function(library.MallocExtension_GetNumericProperty, ctypes.c_int, name, value)
        self._release = _function(library.MallocExtension_ReleaseToSystem, None, ctypes.c_size_t)

    def kept_bytes(self, resident: int) -> int:
        """Count the bytes that are free and resident, whatever else is."""
        outcome = ctypes.c_size_t()
        self._property(b"tcmalloc.pageheap_free_bytes", ctypes.byref(outcome))
        return outcome.value

    def trim(self) -> None:
        """Return all free pages to the system."""
        self._release(_KEEPS_END)


def heap_of_process() -> GlibcHeap | TcmallocHeap | None:
    """Return the heap of this process, with all its blocks from now on; None for another allocator."""
    for kind in (TcmallocHeap, GlibcHeap):
        with suppress(OSError, AttributeError):
            return kind()
    return None


def resident_bytes() -> int:
    """Count the bytes of this process that are in memory."""
    file = os.open("/proc/self/statm", os.O_RDONLY)  # each time: after a fork it would be the parent's
    try:
        return int(os.read(file, 128).split()[1]) * mmap.PAGESIZE
    finally:
        os.close(file)


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


def _function(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


def _may_use_huge_pages() -> bool:
    if os.environ.get("TROCAR_HUGE_PAGES") == "0":
        return False
    try:
        return "[madvise]" in _HUGE_PAGES.read_text() and _OVERCOMMIT.read_text().strip() != _NEVER
    except OSError:
        return False
