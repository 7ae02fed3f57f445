"""A limit to the freed memory that a process keeps.

    limit_freed_memory()                                # once, before training with a spool

# Note: [Freed memory between two extremes]
glibc maps blocks over a threshold one by one: they go back to the system when they are freed, and each new
one is faulted in page by page, which costs a training step 20 to 35 % where all large blocks are treated so.
Smaller ones come from the heap, which keeps what is freed below its end for good, so that a third to a half
of what a spool saves stays with the process. Here all blocks come from the heap, and its free pages are
returned when they come to more than a limit. Below it they are used again without page faults.

# Note: [When to trim]
An operation takes and frees up to some hundred MiB around its result. To return these each time would cost
the page faults again, and gain nothing where the process is far from its peak. Steps are alike: by how much
the process grows after each check is known from the steps before. What was in use at a check and what it
grew by after it is what that part of a step needs; the most of these is what no trim can avoid. So the heap
is trimmed only where the process would grow beyond that. Threads that write and read ahead make one step
need more than another; the least of the last steps counts.
"""

import os
import sys
import threading
from collections import deque

from trocar_api.byte_sizes import byte_count
from trocar_server.spool.heaps import GlibcHeap, TcmallocHeap, heap_of_process, resident_bytes

FREED_BYTES = 64 << 20
_STEPS = 3
"""So many steps tell what the next one needs."""
_MOST_CHECKS = 10_000
"""Of a step: a context may be entered once for a whole training."""


class FreedMemory:
    """Trims a heap when it holds too much free memory; see Note: [When to trim].

    Args:
        heap: The heap of this process.
        most_bytes: The limit.

    Attributes:
        trim_count: How often the heap was trimmed.
    """

    def __init__(self, heap: GlibcHeap | TcmallocHeap, most_bytes: int) -> None:
        self.trim_count = 0
        self._heap, self._most_bytes = heap, most_bytes
        self._checking = threading.Lock()
        self._step = _StepGrowth()
        self._steps = deque([_StepGrowth()], maxlen=_STEPS)
        self._resident_bytes = self._used_bytes = 0  # after the last check
        self._trim()

    def begin_step(self) -> None:
        """Note that a forward pass begins."""
        self._steps.append(self._step)
        self._step = _StepGrowth()

    def check(self) -> None:
        """Trim the heap if it is time; takes some microseconds where it is not."""
        if not self._checking.acquire(blocking=False):
            return
        try:
            if len(self._step.growths) == _MOST_CHECKS:
                self.begin_step()
            resident = resident_bytes()
            kept = self._heap.kept_bytes(resident)
            growth = max(0, resident - self._resident_bytes)
            self._step.add(growth, max(self._used_bytes + growth, resident - kept))
            self._resident_bytes, self._used_bytes = resident, resident - kept
            if kept > self._most_bytes and resident + self._next_growth() > self._needed_bytes():
                self._trim()
        finally:
            self._checking.release()

    def renew_lock(self) -> None:
        """In a forked process: replace the lock, which another thread of the parent may have held."""
        self._checking = threading.Lock()

    def _next_growth(self) -> int:
        number = len(self._step.growths)
        return max(step.growths[number] if number < len(step.growths) else 0 for step in self._steps)

    def _needed_bytes(self) -> int:
        return max(self._step.needed_bytes, min(step.needed_bytes for step in self._steps))

    def _trim(self) -> None:
        self._heap.trim()
        self._resident_bytes = self._used_bytes = resident_bytes()
        self.trim_count += 1


class _StepGrowth:
    """The checks of a step, in bytes: what the process grew by before each, and the most that it needed."""

    def __init__(self) -> None:
        self.growths: list[int] = []
        self.needed_bytes = 0

    def add(self, growth: int, needed_bytes: int) -> None:
        self.growths.append(growth)
        self.needed_bytes = max(self.needed_bytes, needed_bytes)


_limits: list[FreedMemory] = []
"""The limit of this process, once it has one."""


def limit_freed_memory(most_bytes: int | str = FREED_BYTES) -> bool:
    """Let this process keep no more freed memory than this for later, from now on.

    Sets glibc's allocator for the whole process: all blocks come from its heap, which has huge pages where
    Linux leaves these to programs (`TROCAR_HUGE_PAGES=0` in the environment: small ones). With tcmalloc
    preloaded its heap is trimmed in the same way. Spools look after it, whenever a large tensor is saved or
    brought back. Call it before training; again to change the limit.

    Args:
        most_bytes: As a number, or a text such as "64MiB".

    Returns:
        Whether it is so; False where the allocator is neither that of glibc 2.33 or newer nor tcmalloc.

    Raises:
        ValueError: It is negative, or a text that is no size.
        TypeError: It is neither a number nor a text.
    """
    most = byte_count(most_bytes, "most_bytes")
    if most < 0:
        raise ValueError("most_bytes cannot be negative")
    heap = heap_of_process() if sys.platform.startswith("linux") else None
    if heap is None:
        return False
    _limits[:] = [FreedMemory(heap, most)]
    return True


def freed_memory() -> FreedMemory | None:
    """Return the limit of this process; None where it has none."""
    return _limits[0] if _limits else None


def _begin_anew_in_fork() -> None:
    for limit in _limits:
        limit.renew_lock()


os.register_at_fork(after_in_child=_begin_anew_in_fork)
