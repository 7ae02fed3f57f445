"""Durable writes: after a crash each file is the old one or the new one, never half of either.

    with disk_errors("checkpoint"):
        write_durably(folder / "7.json", content)

The only writer of complete files of the server.

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
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_CLAIM_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


class DamagedError(Exception):
    """A file is not as it was written; the text says how this was detected."""


def write_durably(
    path: Path,
    content: bytes | Iterable[bytes | memoryview],
    *,
    is_private: bool = True,
    is_durable: bool = True,
    is_new: bool = False,
) -> None:
    """Write a file, see Note: [Durable write].

    Args:
        path: The target; an existing file is replaced, and its mode stays.
        content: All of it, or one piece after another.
        is_private: Whether only its owner may read a new file; otherwise the umask decides.
        is_durable: Whether to wait for the disk; without, a crash of the machine may lose it.
        is_new: Whether to refuse an existing target, of whatever kind.

    Raises:
        FileExistsError: With `is_new`, the target exists; it is as it was.
        OSError: `path` is as it was, unless only the last fsync, that of the folder, failed.
    """
    with contextlib.closing(PartialFile(path.parent, f"{path.stem}-", is_private=is_private)) as partial:
        for piece in (content,) if isinstance(content, bytes) else content:
            partial.write(piece)
        partial.publish(path, is_durable=is_durable, is_new=is_new)


class PartialFile:
    """A file that is being written, for content that arrives over time; `close` removes it unless published.

        with closing(PartialFile(folder)) as partial:
            for piece in pieces:
                partial.write(piece)
            partial.publish(folder / "7.json")

    Its temporary name is locked as in Note: [Abandoned files].

    Args:
        folder: Folder of the target, or another one of the same disk.
        prefix: Prefix of the temporary name.
        is_private: As for `write_durably`.

    Raises:
        OSError: The file cannot be created.
    """

    def __init__(self, folder: Path, prefix: str = "", *, is_private: bool = True) -> None:
        mode = 0o600 if is_private else 0o666
        self.path, self._descriptor = janitor.create_locked(
            folder, lambda: f"{prefix}{uuid.uuid4().hex}{PARTIAL}", mode
        )
        self._is_published = False

    @property
    def descriptor(self) -> int:
        """The open file, for reading back.

        Raises:
            OSError: It is closed.
        """
        if self._descriptor < 0:
            raise OSError(errno.EBADF, "the file is closed")
        return self._descriptor

    def write(self, piece: bytes | memoryview) -> None:
        """Append bytes.

        Raises:
            OSError: The disk is full or failing, or the file is closed.
        """
        rest = memoryview(piece)
        while rest.nbytes:
            rest = rest[os.write(self.descriptor, rest) :]

    def sync(self) -> None:
        """Wait until the bytes are on the disk.

        Raises:
            OSError: They may not be, and a second attempt would not tell, see Note: [Durable write].
        """
        os.fsync(self.descriptor)

    def publish(self, path: Path, *, is_durable: bool = True, is_new: bool = False) -> None:
        """Give the complete file its name; for the arguments and errors, see `write_durably`."""
        _keep_mode(self.descriptor, path)
        if is_durable:
            self.sync()
        # Before it is closed, which unlocks it: another server could take it for a leftover.
        if is_new:
            _name_new(self.path, path)
        else:
            os.replace(self.path, path)  # noqa: PTH105 - one place for all operations, for tests to break each
        self._is_published = True
        if is_durable:
            sync_folder(path.parent)

    def close(self) -> None:
        """Close the file, and remove it unless it was published. Idempotent."""
        if self._descriptor >= 0:
            if not self._is_published:
                remove_quietly(self.path)
            os.close(self._descriptor)
            self._descriptor = -1


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
    os.replace(source, target)  # noqa: PTH105 - as in `PartialFile`
    sync_folder(target.parent)


def link_durably(source: Path, target: Path) -> bool:
    """Give a complete file, whose bytes are on the disk, a second name in place of whatever has it.

    Returns:
        Whether it has the name; not on a file system without hard links, or with too many of this file.

    Raises:
        OSError: The name is absent, unless only the last fsync, that of the folder, failed.
    """
    with contextlib.suppress(FileNotFoundError):
        os.unlink(target)  # noqa: PTH108 - as in `PartialFile`
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno in _NO_LINKS:
            return False
        raise
    sync_folder(target.parent)
    return True


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
        os.mkdir(folder, 0o700)  # noqa: PTH102 - as in `PartialFile`
    sync_folder(folder.parent)


def remove_quietly(path: Path) -> None:
    """Remove a file as far as the disk lets us, where another error is already on its way."""
    with contextlib.suppress(OSError):
        os.unlink(path)  # noqa: PTH108 - as in `PartialFile`


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


def _name_new(partial: Path, path: Path) -> None:
    """Rename a file unless the target exists: a link is refused then, a rename would not be."""
    try:
        os.link(partial, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _replace_own(partial, path)
    else:
        remove_quietly(partial)


def _replace_own(partial: Path, path: Path) -> None:
    """Rename a file over an empty one that this call has created; its readers may see it empty meanwhile."""
    os.close(os.open(path, _CLAIM_FLAGS, 0o600))
    try:
        os.replace(partial, path)  # noqa: PTH105 - as in `PartialFile`
    except BaseException:
        remove_quietly(path)
        raise
