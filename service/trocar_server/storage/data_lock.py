"""Data lock: only one server at a time writes into a folder.

    lock = lock_folder(data_dir / "trainers")
    lock.release()

The kernel releases it when the server dies, however it dies. The file stays: removing it would let two
servers hold locks of two files of the same name.
"""

import contextlib
import fcntl
import os
import weakref
from pathlib import Path

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.storage.disk_errors import disk_errors
from trocar_server.storage.durable import make_folder

LOCK_NAME = "lock"
"""Name of the locked file in the folder."""

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_held: "weakref.WeakSet[FolderLock]" = weakref.WeakSet()


class FolderLock:
    """An acquired lock.

    Args:
        descriptor: The locked file's.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        _held.add(self)

    def release(self) -> None:
        """Release the lock; idempotent."""
        if self._descriptor is not None:
            # explicitly, because a forked process may have the file open, too
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.forget()

    def forget(self) -> None:
        """Close the file without unlocking it: in a forked process the lock is the parent's."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def lock_folder(folder: Path) -> FolderLock:
    """Lock a folder, which is created if missing.

    Raises:
        ServiceError: `STORAGE_UNAVAILABLE`, another server has locked it, named by its process id; or the
            disk fails.
    """
    with disk_errors("lock of the data directory"):
        make_folder(folder)
        descriptor = os.open(folder / LOCK_NAME, _FLAGS, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            raise _taken(holder) from None
        except BaseException:
            os.close(descriptor)
            raise
    return FolderLock(descriptor)


def _taken(holder: str) -> ServiceError:
    who = f"another server (process {holder})" if holder.isdigit() else "another server"
    return ServiceError(
        ErrorReason.STORAGE_UNAVAILABLE,
        f"{who} uses this data directory; stop it, or give this server another `data_dir`",
        process=holder if holder.isdigit() else "",
    )


def _forget_in_fork() -> None:
    for lock in list(_held):
        with contextlib.suppress(OSError):
            lock.forget()


os.register_at_fork(after_in_child=_forget_in_fork)
