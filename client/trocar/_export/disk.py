"""Files and folders of an output: listing, hashing, removal and the lock."""

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trocar.errors import OutputError


def files_in(path: Path) -> list[Path]:
    """Return a file itself, or every file below a folder, sorted."""
    if path.is_file():
        return [path]
    return sorted(Path(folder, name) for folder, _, names in os.walk(path) for name in names)


def sha256(path: Path) -> str:
    """Hash a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove(path: Path) -> None:
    """Delete a file or a folder if it exists."""
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
