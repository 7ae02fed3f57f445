"""Durable writes: after a crash each file is the old one or the new one, never half of either.

    with disk_errors("checkpoint"):
        write_durably(folder / "7.json", content)

# Note: [Durable write]
Temporary file, fsync, rename, fsync of the folder. A failed fsync is never tried again: the kernel may have
dropped the pages and would report success (https://lwn.net/Articles/752063). The file is removed instead and
the caller is told. What a killed process left has the suffix `PARTIAL` and is removed by the next one, see
Note: [Abandoned files].
"""

import contextlib
import errno
import os
import re
import stat
import uuid
from collections.abc import Iterable
from pathlib import Path

from trocar_server.storage import janitor

PARTIAL = ".partial"
"""Suffix of files that are being written."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class DamagedError(Exception):
    """A file is not as it was written; the text says how this was detected."""


def write_durably(
    path: Path,
    content: bytes | Iterable[bytes | memoryview],
    *,
    is_private: bool = True,
    is_durable: bool = True,
) -> None:
    """Write a file, see Note: [Durable write]: the only writer of complete files of this package.

    Args:
        path: The target; an existing file is replaced, and its mode stays.
        content: All of it, or one piece after another.
        is_private: Whether only its owner may read a new file; otherwise the umask decides.
        is_durable: Whether to wait for the disk; without, a crash of the machine may lose it.

    Raises:
        OSError: `path` is as it was, unless only the last fsync, that of the folder, failed.
    """
    partial, descriptor = open_partial(path.parent, f"{path.stem}-", 0o600 if is_private else 0o666)
    try:
        try:
            _keep_mode(descriptor, path)
            for piece in (content,) if isinstance(content, bytes) else content:
                _write_all(descriptor, piece)
            if is_durable:
                os.fsync(descriptor)
            # Before it is closed, which unlocks it: another server could take it for a leftover.
            os.replace(partial, path)  # noqa: PTH105 - one place for all operations, for tests to break each
        finally:
            os.close(descriptor)
    except BaseException:
        remove_quietly(partial)
        raise
    if is_durable:
        sync_folder(path.parent)


def move_durably(source: Path, target: Path) -> None:
    """Give a complete file of the same disk another name, see Note: [Durable write].

    Raises:
        OSError: `target` is as it was, unless only the last fsync, that of the folder, failed.
    """
    descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.replace(source, target)  # noqa: PTH105 - as in `write_durably`
    sync_folder(target.parent)


def open_partial(folder: Path, prefix: str = "", mode: int = 0o600) -> tuple[Path, int]:
    """Create a file to be written, locked as in Note: [Abandoned files], and return its descriptor.

    Args:
        folder: Where.
        prefix: Prefix of its name.
        mode: Its mode, of which the umask takes away.

    Raises:
        OSError: It cannot be created.
    """
    return janitor.create_locked(folder, lambda: f"{prefix}{uuid.uuid4().hex}{PARTIAL}", mode)


def remove_partial(folder: Path, prefix: str = "") -> int:
    """Remove what killed processes left half-written in a folder; return the number of files.

    Args:
        folder: The folder; a missing one counts as empty.
        prefix: Prefix of the names.
    """
    names = re.compile(f"{re.escape(prefix)}.*{re.escape(PARTIAL)}", re.DOTALL)
    return janitor.remove_abandoned(folder, names)


def sync_folder(folder: Path) -> None:
    """Make renames, creations and removals in a folder survive a crash (fsync)."""
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
    raise DamagedError("it is not a regular file")


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


def is_disk_full(error: OSError) -> bool:
    """Whether an error says that there is no room: on the disk, within a quota, or in one file."""
    return error.errno in _FULL


def _keep_mode(descriptor: int, path: Path) -> None:
    """Give a file the mode of the one that it replaces, before it has content."""
    with contextlib.suppress(FileNotFoundError):
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode):
            os.fchmod(descriptor, stat.S_IMODE(status.st_mode))


def _write_all(descriptor: int, piece: bytes | memoryview) -> None:
    rest = memoryview(piece)
    while rest.nbytes:
        rest = rest[os.write(descriptor, rest) :]
