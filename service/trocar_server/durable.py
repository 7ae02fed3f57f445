"""Files that survive a crash: each is the old one or the new one, never half of either.

    with disk_errors("checkpoint"):
        write_durably(folder / "7.json", content)

# Note: [Durable write]
Temporary file, fsync, rename, fsync of the folder. A failed fsync is never tried again: the kernel may have
dropped the pages and would report success (https://lwn.net/Articles/752063). The file is removed instead and
the caller is told. What a killed process left has the suffix `PARTIAL`, and is for a janitor to remove.

# Note: [Whose partial file]
Whoever writes a file holds a lock on it; the kernel lets go of it when he dies, however he dies. A file whose
lock is free is a leftover. Between being made and being locked a file may be taken for one: then it has no
name any more, and another is made.
"""

import contextlib
import errno
import fcntl
import os
import stat
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

PARTIAL = ".partial"
"""How the names of files end that are being written."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_ATTEMPTS = 8
_PARTIAL_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_log = structlog.get_logger("trocar")


class DamagedError(Exception):
    """A file is not as it was written; the text says how it shows."""


def write_durably(path: Path, content: bytes | Iterable[bytes | memoryview]) -> None:
    """Write a file, see Note: [Durable write]; only its owner may read it.

    Args:
        path: Where; what is there is replaced.
        content: All of it, or one piece after another.

    Raises:
        OSError: `path` is as it was, unless only the last fsync, that of the folder, failed.
    """
    partial, descriptor = open_partial(path.parent, f"{path.stem}-")
    try:
        try:
            for piece in (content,) if isinstance(content, bytes) else content:
                _write_all(descriptor, piece)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(partial, path)  # noqa: PTH105 - one place for all operations, so that tests can break each
    except BaseException:
        remove_quietly(partial)
        raise
    sync_folder(path.parent)


def open_partial(folder: Path, prefix: str = "") -> tuple[Path, int]:
    """Make a file to be written, locked as in Note: [Whose partial file], and return its descriptor.

    Args:
        folder: Where.
        prefix: How its name begins.

    Raises:
        OSError: It cannot be made.
    """
    for _ in range(_ATTEMPTS):
        path = folder / f"{prefix}{uuid.uuid4().hex}{PARTIAL}"
        descriptor = os.open(path, _PARTIAL_FLAGS, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: leftovers stay there
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return path, descriptor
        os.close(descriptor)
    raise OSError("another process removes partial files as soon as they are made")


def remove_abandoned(folder: Path, prefix: str = "") -> None:
    """Remove what killed processes left half-written in a folder, see Note: [Whose partial file].

    Args:
        folder: Where; one that is not there has nothing in it.
        prefix: How the names begin.
    """
    for path in folder.glob(f"{prefix}*{PARTIAL}"):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, _READ_FLAGS)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)  # noqa: PTH108 - as in `write_durably`
            finally:
                os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make what was renamed, made or removed in a folder survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it that are missing, durably; only their owner may enter."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)  # noqa: PTH102 - as in `write_durably`
    sync_folder(folder.parent)


def remove_quietly(path: Path) -> None:
    """Remove a file as far as the disk lets us, where another error is already on its way."""
    with contextlib.suppress(OSError):
        os.unlink(path)  # noqa: PTH108 - as in `write_durably`


def open_regular(path: Path) -> int:
    """Open a file for reading and return its descriptor; links, pipes and folders are no files.

    Raises:
        DamagedError: It is no regular file.
        OSError: It cannot be opened.
    """
    try:
        descriptor = os.open(path, _READ_FLAGS)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DamagedError("it is a link") from None
        raise
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise DamagedError("it is no regular file")


def read_whole(path: Path, max_bytes: int) -> bytes:
    """Return the content of a file.

    Raises:
        DamagedError: It is no regular file, or has more bytes.
        OSError: It cannot be read.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise DamagedError(f"it has more than {max_bytes:,} bytes")
    return content


@contextlib.contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turn the disk's errors into the domain's.

    Args:
        what: What is being read or written, for the message: "checkpoint".

    Raises:
        ServiceError: `STORAGE_FULL` or `STORAGE_UNAVAILABLE`.
    """
    try:
        yield
    except OSError as error:
        raise storage_error(what, error) from error


def storage_error(what: str, error: OSError) -> ServiceError:
    """Log an error of the disk and return what a caller is told of it; it names no path."""
    why = error.strerror or type(error).__name__
    _log.warning("the disk failed", what=what, problem=why)
    if error.errno in _FULL:
        return ServiceError(
            ErrorReason.STORAGE_FULL,
            f"the server's disk is full, the {what} was not written; delete something or have its operator "
            "make room",
        )
    return ServiceError(
        ErrorReason.STORAGE_UNAVAILABLE,
        f"the server's disk failed at the {what} ({why}); its operator has to see to that",
    )


def _write_all(descriptor: int, piece: bytes | memoryview) -> None:
    rest = memoryview(piece)
    while rest.nbytes:
        rest = rest[os.write(descriptor, rest) :]
