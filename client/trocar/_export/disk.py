"""Durable files: guarantees after a kill or a power cut."""

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trocar._base.replacement import put, sync
from trocar.errors import OutputError


def publish(part: Path, path: Path) -> None:
    """Give a finished file or folder its name, once its bytes are on the disk."""
    for found in (*files_in(part), *folders_in(part)):
        sync(found)
    if path.is_dir():
        shutil.rmtree(path)  # of the same shard, from a run that was killed before it recorded it
    put(part, path)


def files_in(path: Path) -> list[Path]:
    """Return a file itself, or every file below a folder, sorted."""
    if path.is_file():
        return [path]
    return sorted(Path(folder, name) for folder, _, names in os.walk(path) for name in names)


def folders_in(path: Path) -> list[Path]:
    """Return a folder and every folder below it; nothing for a file."""
    return [Path(folder) for folder, _, _ in os.walk(path)]


def sha256(path: Path) -> str:
    """Hash a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(path: Path) -> None:
    """Delete a file or a folder; no effect if there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Lock a folder against other processes for as long as the context is open; a kill releases it.

    Raises:
        OutputError: Another process is in it.
    """
    if sys.platform == "win32":  # folders cannot be locked there
        yield
        return
    import fcntl

    handle = os.open(root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(
                f"another run writes to {root}; wait for it, or choose another --out"
            ) from error
        except OSError:
            pass  # a file system without locks, as some network ones are
        yield
    finally:
        os.close(handle)
