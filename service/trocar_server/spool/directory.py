"""One folder for each process, which goes with it.

A lock on a file inside says that the owner lives. Who comes later removes the folders whose lock is free: those of
killed processes, and nobody else's.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
from pathlib import Path

_PREFIX = "trocar-spool-"
_LOCK = "lock"


class SpoolDirectory:
    """A folder of one process under a common one; leftovers of killed processes are removed when it is made.

    Attributes:
        path: The folder.
    """

    def __init__(self, parent: Path) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(parent)
        self.path = parent / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        self.path.mkdir(mode=0o700)
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def close(self) -> None:
        """Remove the folder."""
        with contextlib.suppress(OSError):
            shutil.rmtree(self.path, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._lock)


def remove_leftovers(parent: Path) -> int:
    """Remove folders whose process is gone; returns how many."""
    count = 0
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
                count += 1
            finally:
                os.close(lock)
    return count
