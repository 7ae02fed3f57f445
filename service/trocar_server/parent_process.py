"""The process that started this one: a worker ends with it."""

import ctypes
import os
import signal
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>."""


def end_with(parent: int) -> None:
    """Let the kernel end this process when its parent dies for any reason; exit if it is dead already.

    Linux only; elsewhere a worker has to notice the end of its input. To be called before anything that takes
    long: a worker that was orphaned earlier lives on.

    Args:
        parent: Its process id.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
