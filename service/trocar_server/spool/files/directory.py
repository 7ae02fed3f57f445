"""Spool directory: one folder per process, removed with it.

# Note: [Folder ownership]
A lock on a file inside shows that the owner is alive; the kernel releases it when the owner dies, in any
way. A later process removes the folders that were left behind: those with a name of ours, of the same user,
with nothing inside but what a spool makes, with our mark in the lock file, made on this machine, and whose
lock is free. All other folders stay. The lock file goes last, so that a folder half removed is still known as
ours.
"""

import contextlib
import fcntl
import os
import re
import secrets
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

_NAME = re.compile(r"trocar-spool-\d+-[0-9a-f]{8}")
_BLOCKS = r"step-\d{6,}-blocks-\d{6,}-\d{6,}-file-\d{6,}\.safetensors"
_OF_OLDER_VERSIONS = r"\d{8,}\.safetensors"
_FILE = re.compile(rf"file-\d{{6,}}\.part|{_BLOCKS}|{_OF_OLDER_VERSIONS}")
_LOCK = "lock"
_MARK = "trocar spool 1"
_ATTEMPTS = 8
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class SpoolDirectory:
    """A folder of one process under a common one; leftovers of killed processes are removed when it is made.

    Attributes:
        path: The folder.

    Raises:
        OSError: It cannot be made.
    """

    def __init__(self, parent: Path) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(parent)
        for _ in range(_ATTEMPTS):
            self.path = parent / f"trocar-spool-{os.getpid()}-{secrets.token_hex(4)}"
            self.path.mkdir(mode=0o700)
            lock = claim_lock(self.path / _LOCK)
            if lock is not None:
                self._lock: int | None = lock
                return
        raise OSError(f"other processes remove folders in {parent} as soon as they are created")

    def exists(self) -> bool:
        """Whether the folder is still there."""
        return self.path.is_dir()

    def forget(self) -> None:
        """Forget the folder without removing it, in a forked process: the lock is the parent's alone."""
        lock, self._lock = self._lock, None  # first: a fork between the two would close it again
        if lock is not None:
            os.close(lock)

    def close(self) -> None:
        """Remove the folder."""
        if self._lock is None:
            return
        with contextlib.suppress(OSError), _opened(self.path) as folder:
            _remove(self.path, folder)
        self.forget()


def remove_leftovers(parent: Path) -> int:
    """Remove the folders of killed processes, see Note: [Folder ownership]; returns how many."""
    count = 0
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(parent)):
            if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                with contextlib.suppress(OSError):
                    count += _remove_leftover(parent / entry.name)
    return count


def claim_lock(path: Path) -> int | None:
    """Create and lock a lock file; None if another process took the folder for a leftover."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(lock, f"{_MARK}\n{_machine()}\n".encode())
        if os.fstat(lock).st_nlink:
            return lock
    except BlockingIOError:
        pass
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _remove_leftover(path: Path) -> bool:
    with _opened(path) as folder:
        names = _names(folder)
        is_like_ours = all(name == _LOCK or _FILE.fullmatch(name) for name in names)
        if not is_like_ours or os.fstat(folder).st_uid != os.geteuid():
            return False
        if _LOCK not in names:  # killed before it had one; with files it is not ours
            if not names:
                path.rmdir()
            return not names
        lock = os.open(_LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = _is_ours(lock, has_files=len(names) > 1)
            if is_ours:
                _remove(path, folder)
            return is_ours
        finally:
            os.close(lock)


def _is_ours(lock: int, has_files: bool) -> bool:
    """Whether a spool on this machine made a lock file; if it was killed at once, nothing is in it yet."""
    result = os.fstat(lock)
    if not stat.S_ISREG(result.st_mode) or result.st_uid != os.geteuid():
        return False
    mark, _, machine = os.pread(lock, 4096, 0).decode(errors="replace").partition("\n")
    if not mark and not machine:
        return not has_files
    return mark == _MARK and bool(set(machine.split()) & set(_machine().split()))


def _machine() -> str:
    """Name this machine: locks of others may not be seen here, on a network filesystem."""
    names = [f"host:{socket.gethostname()}"]
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        names.append(f"boot:{boot}")
    return " ".join(names)


def _remove(path: Path, folder: int) -> None:
    """Remove a folder with the files that a spool makes, the lock last."""
    for name in sorted(_names(folder), key=lambda name: name == _LOCK):
        if name == _LOCK or _FILE.fullmatch(name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
    path.rmdir()


def _names(folder: int) -> list[str]:
    return [entry.name for entry in os.scandir(folder)]


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    folder = os.open(path, _FOLDER_FLAGS)
    try:
        yield folder
    finally:
        os.close(folder)
