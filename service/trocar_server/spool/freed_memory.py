"""A limit to the freed memory that a process keeps, with glibc's heap in huge pages.

    limit_freed_memory()                                # once, before training with a spool

# Note: [Freed memory between two extremes]
glibc maps blocks over a threshold one by one: they go back to the system when they are freed, and each new
one is faulted in page by page, which costs a training step 20 to 35 % where all large blocks are treated so.
Smaller ones come from the heap, which keeps what is freed below its end for good, so that a third to a half
of what a spool saves stays with the process. Here all blocks come from the heap, and its free pages are
returned when they come to more than a limit. Below it they are used again without page faults.

# Note: [Resident free memory]
glibc knows how many bytes are free, but not which of them are resident; the kernel knows how many are
resident, but not which of them are free. Right after a trim no free page is resident, so what is resident
beyond the bytes in use is the rest of the process. What comes to this rest later is free memory, or was
mapped by others; then one trim is made for nothing.

# Note: [When to trim]
An operation takes and frees up to some hundred MiB around its result. To return these each time would cost
the page faults again, and gain nothing where the process is far from its peak. How much it needs at its peak
shows one check after a trim, when no page that is free was resident before. So the heap is trimmed only where
the process is larger than it had to be so far in this step or the last.
"""

import ctypes
import mmap
import os
import sys
import threading
from pathlib import Path
from typing import Any

from trocar_api.byte_sizes import byte_count

FREED_BYTES = 64 << 20

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


class Heap:
    """glibc's heap of this process.

    Raises:
        OSError: The C library is not glibc, or another allocator was preloaded.
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

    def hold_all_blocks(self) -> bool:
        """Let large blocks come from the heap, too, and let nothing be returned but by `trim`.

        One arena, because the heap of a thread's own arena holds no block over 64 MiB.

        Returns:
            Whether the settings were taken.
        """
        settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _NEVER_TRIMMED), (_M_ARENA_MAX, 1))
        return [self._mallopt(option, value) for option, value in settings] == [1, 1, 1]

    def used_bytes(self) -> int:
        """Count the bytes of blocks that are in use, in all arenas."""
        counts = self._counts()
        return int(counts.uordblks + counts.hblkhd)

    def trim(self) -> None:
        """Return all free pages to the system."""
        self._malloc_trim(_KEEPS_END)
        self._trim_end()
        if _may_use_huge_pages() and self._counts().keepcost < _LOW_BYTES:
            self.reserve()

    def reserve(self) -> None:
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


class FreedMemory:
    """Trims a heap when it holds too much free memory; see Note: [When to trim].

    Args:
        heap: The heap of this process.
        most_bytes: The limit.

    Attributes:
        trim_count: How often the heap was trimmed.
    """

    def __init__(self, heap: Heap, most_bytes: int) -> None:
        self.trim_count = 0
        self._heap, self._most_bytes = heap, most_bytes
        self._checking = threading.Lock()
        self._rest_bytes = self._needed_bytes = self._needed_before_bytes = 0
        self._is_trimmed = False
        self._trim()

    def begin_step(self) -> None:
        """Note that a forward pass begins: what the last but one needed no longer counts."""
        self._needed_before_bytes, self._needed_bytes = self._needed_bytes, 0

    def check(self) -> None:
        """Trim the heap if it is time; takes some microseconds where it is not."""
        if not self._checking.acquire(blocking=False):
            return
        try:
            resident, used = _resident_bytes(), self._heap.used_bytes() + self._rest_bytes
            self._needed_bytes = max(self._needed_bytes, resident if self._is_trimmed else used)
            self._is_trimmed = False
            needed = max(self._needed_bytes, self._needed_before_bytes)
            if resident - used > self._most_bytes and resident > needed:
                self._trim()
        finally:
            self._checking.release()

    def _trim(self) -> None:
        self._heap.trim()
        self._rest_bytes = _resident_bytes() - self._heap.used_bytes()
        self._is_trimmed = True
        self.trim_count += 1


_limits: list[FreedMemory] = []
"""The limit of this process, once it has one."""


def limit_freed_memory(most_bytes: int | str = FREED_BYTES) -> bool:
    """Let this process keep no more freed memory than this for later, from now on.

    Sets glibc's allocator for the whole process: all blocks come from its heap, which has huge pages where
    Linux leaves these to programs (`TROCAR_HUGE_PAGES=0` in the environment: small ones). Spools look after
    it, whenever a large tensor is saved or brought back. Call it before training; again to change the limit.

    Args:
        most_bytes: As a number, or a text such as "64MiB".

    Returns:
        Whether it is so; False where the C library is not glibc 2.33 or newer.

    Raises:
        ValueError: It is negative, or a text that is no size.
        TypeError: It is neither a number nor a text.
    """
    most = byte_count(most_bytes, "most_bytes")
    if most < 0:
        raise ValueError("most_bytes cannot be negative")
    if not sys.platform.startswith("linux"):
        return False
    try:
        heap = Heap()
    except (OSError, AttributeError):
        return False
    if not heap.hold_all_blocks():
        return False
    if not _limits and _may_use_huge_pages():
        heap.reserve()
    _limits[:] = [FreedMemory(heap, most)]
    return True


def freed_memory() -> FreedMemory | None:
    """Return the limit of this process; None where it has none."""
    return _limits[0] if _limits else None


def _address(function: Any) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value


def _function(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function


def _resident_bytes() -> int:
    file = os.open("/proc/self/statm", os.O_RDONLY)  # each time: after a fork it would be the parent's
    try:
        return int(os.read(file, 128).split()[1]) * mmap.PAGESIZE
    finally:
        os.close(file)


def _may_use_huge_pages() -> bool:
    if os.environ.get("TROCAR_HUGE_PAGES") == "0":
        return False
    try:
        return "[madvise]" in _HUGE_PAGES.read_text() and _OVERCOMMIT.read_text().strip() != _NEVER
    except OSError:
        return False
