r"""Janitor: removes files whose process was killed while it needed them.

    path, descriptor = create_locked(folder, lambda: f"{uuid.uuid4().hex}.partial")
    remove_abandoned(folder, re.compile(r"[0-9a-f]{32}\.partial"))      # by the next process

# Note: [Abandoned files]
A process holds a lock on a file for as long as it needs its name; the kernel releases it when the process
ends, however it ends. A file whose lock is free is a leftover. Between creation and locking a file may be
mistaken for one and unlinked: then another is created.
"""

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

_ATTEMPTS = 8
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def create_locked(folder: Path, draw_name: Callable[[], str], mode: int = 0o600) -> tuple[Path, int]:
    """Create an empty file, locked as in Note: [Abandoned files], and return its descriptor.

    An existing file or link of that name is not opened: another name is drawn.

    Args:
        folder: Where.
        draw_name: Draws a random name.
        mode: Its mode, of which the umask takes away; by default only this user can open it.

    Raises:
        OSError: It cannot be created.
    """
    for _ in range(_ATTEMPTS):
        path = folder / draw_name()
        try:
            descriptor = os.open(path, _CREATE, mode)
        except FileExistsError:
            continue
        with contextlib.suppress(OSError):  # a file system without locks: leftovers stay there
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)
    raise FileExistsError("no name is free, or another process removes files as soon as they are created")


def remove_abandoned(folder: Path, names: re.Pattern[str]) -> int:
    """Remove this user's files of killed processes, see Note: [Abandoned files]; return their number.

    Args:
        folder: The folder; a missing one counts as empty.
        names: Pattern of whole names. Links, folders and pipes of such names stay.
    """
    count = 0
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(folder)):
            if names.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    count += _remove_unlocked(folder / entry.name)
    return count


def _remove_unlocked(path: Path) -> bool:
    descriptor = os.open(path, _READ)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(path)  # noqa: PTH108 - as in `durable`
        return True
    finally:
        os.close(descriptor)
