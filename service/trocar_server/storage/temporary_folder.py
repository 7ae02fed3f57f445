"""Temporary folders of this user alone; none outlives its process.

    folder = TemporaryFolder()
    convert(module, recipe, folder.path)
    folder.cleanup()

# Note: [Owner of a temporary folder]
A lock on the folder shows that its owner is alive; the kernel releases it when the owner dies for any reason.
Folders of this user whose lock is free are removed when the next server starts: each may be as large as a
model.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

_PREFIX = "trocar-form-"
_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ATTEMPTS = 8


class TemporaryFolder:
    """A folder of this process, removed by `cleanup`, with the object, or after the process ends.

    Attributes:
        path: Its path.

    Args:
        parent: Parent folder; the system's folder for temporary files when None.

    Raises:
        OSError: It cannot be created.
    """

    def __init__(self, parent: Path | None = None) -> None:
        for _ in range(_ATTEMPTS):
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            with contextlib.suppress(FileNotFoundError):  # another server removed it as a leftover
                lock = _locked(self.path)
                self._remove = weakref.finalize(self, _remove, self.path, lock)
                if self.path.is_dir():
                    return
                self._remove()
        raise OSError("other processes remove folders as soon as they are created")

    def cleanup(self) -> None:
        """Remove the folder; a second call does nothing."""
        self._remove()


def remove_leftovers(parent: Path | None = None) -> int:
    """Remove folders of killed processes, see Note: [Owner of a temporary folder]; returns their number.

    Args:
        parent: As in `TemporaryFolder`.
    """
    count = 0
    for path in (parent or Path(tempfile.gettempdir())).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, _FLAGS)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_uid == os.geteuid():
                    shutil.rmtree(path, ignore_errors=True)
                    count += 1
            finally:
                os.close(descriptor)
    return count


def _locked(path: Path) -> int:
    descriptor = os.open(path, _FLAGS)
    with contextlib.suppress(OSError):  # a file system without locks: leftovers are never removed
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
