"""C allocator settings for a process that trains with a spool: freed memory goes back to the system at once.

    return_freed_memory()                               # in this process, any time
    subprocess.run(command, env=os.environ | ALLOCATOR_ENVIRONMENT)     # for another one, huge pages on

By default glibc keeps most of what is freed for the next allocation, so that the memory which a spool saves
stays with the process. Large blocks that are mapped one by one go back, but each is faulted in anew, page by
page; huge pages make that cheap, and can be switched on only before a process starts.
"""

import ctypes
import sys

LARGE_BYTES = 1 << 20

ALLOCATOR_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": f"{LARGE_BYTES}",
    "MALLOC_TRIM_THRESHOLD_": f"{LARGE_BYTES}",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""What to add to the environment of a process that is to train with a spool. Huge pages need glibc 2.35."""

# From malloc.h of glibc.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def return_freed_memory() -> bool:
    """Let glibc give blocks of a MiB and more back to the system as soon as they are freed.

    Counts for what is allocated from now on. Undoes what
    `engine.schedule.allocator.keep_freed_memory` sets, so not for a
    process that serves: passes without gradients are faster with memory that is kept.

    Returns:
        Whether the settings were taken; False where the C library is not glibc.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    options = (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD)
    return [mallopt(option, LARGE_BYTES) for option in options] == [1, 1]
