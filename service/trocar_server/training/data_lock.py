"""A lock that says that one server, and no other, writes into a folder.

    lock = lock_folder(data_dir / "trainers")
    lock.release()

The kernel lets go of it when the server dies, however it dies. The file stays: removing it would let two
servers hold locks of two files of the same name.
"""

import contextlib
import fcntl
import os
import weakref
from pathlib import Path

from trocar_api.reasons import ErrorReason
from trocar_server.durable import disk_errors, make_folder
from trocar_server.errors import ServiceError

LOCK_NAME = "lock"
"""Of the file in the folder that is locked."""

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_held: "weakref.WeakSet[FolderLock]" = weakref.WeakSet()


class FolderLock:
    """A lock that is held.

    Args:
        descriptor: Of the locked file.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        _held.add(self)

    def release(self) -> None:
        """Let go of it; again does nothing."""
        if self._descriptor is not None:
            # explicitly, because a forked process may have the file open, too
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.forget()

    def forget(self) -> None:
        """Let go of it in a forked process: it is the parent's."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def lock_folder(folder: Path) -> FolderLock:
    """Lock a folder, which is made where it is missing.

    Raises:
        ServiceError: `STORAGE_UNAVAILABLE`, another server has it, which is named by its process id; or the
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
        f"{who} keeps its trainers in this data directory; stop it, or give this server another `data_dir`",
        process=holder if holder.isdigit() else "",
    )


def _forget_in_fork() -> None:
    for lock in list(_held):
        with contextlib.suppress(OSError):
            lock.forget()


os.register_at_fork(after_in_child=_forget_in_fork)
