"""Shared lock: one thread of one server at a time changes a folder that the servers of a cluster share.

    lock = SharedLock(data_dir / "datasets")
    with lock:
        ...                             # look, then write or remove

The kernel releases it when a server dies. Unlike the lock of `data_lock`, it is held for one change, and
others wait for it.
"""

import fcntl
import os
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from trocar_server.storage.data_lock import LOCK_NAME

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class SharedLock:
    """A lock among threads and processes. Not reentrant.

    While the folder does not exist, or on a file system without locks, it holds among threads only.

    Args:
        folder: The folder; the lock is its file `lock`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._threads = threading.Lock()
        self._descriptor = -1

    def __enter__(self) -> None:
        """Wait for the lock.

        Raises:
            OSError: The file cannot be opened.
        """
        self._threads.acquire()
        try:
            with suppress(FileNotFoundError):
                self._descriptor = os.open(self._folder / LOCK_NAME, _FLAGS, 0o600)
                with suppress(OSError):  # a file system without locks
                    fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        except BaseException:
            self._threads.release()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release it."""
        descriptor, self._descriptor = self._descriptor, -1
        try:
            if descriptor >= 0:
                with suppress(OSError):
                    fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked process may have the file open, too
                os.close(descriptor)
        finally:
            self._threads.release()
