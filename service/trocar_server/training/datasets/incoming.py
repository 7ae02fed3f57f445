"""Shards on their way in, and where they are kept.

# Note: [One content, many owners]
A shard lies in its owner's folder, and nothing is ever looked up anywhere else: what a caller may use is what
he has sent. The same bytes of several owners are one file with several names, hard links: the first is in the
pool, where a newcomer's bytes are compared with what is there before his copy is dropped. A name in the pool
that is the only one left belongs to nobody and goes. Where a file system has no hard links every owner has
his own copy.
"""

import contextlib
import errno
import hashlib
import os
from pathlib import Path
from threading import Lock

from trocar_api.reasons import ErrorReason
from trocar_server.durable import open_partial, sync_folder
from trocar_server.errors import ServiceError
from trocar_server.training.datasets.form import Shard
from trocar_server.training.datasets.inspection import check_images, inspect

_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class IncomingShard:
    """A shard as it comes in; `close` leaves nothing of it but what was kept.

    Safe to call from several threads: one may close it while another still writes for a call that is gone.

    Args:
        folder: Where it is until it is whole.
        shard: What it has to become.

    Raises:
        OSError: No file can be made.
    """

    def __init__(self, folder: Path, shard: Shard) -> None:
        self.shard = shard
        self._lock = Lock()
        self._path, self._descriptor = open_partial(folder)
        self._digest = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes) -> None:
        """Append bytes.

        Raises:
            ServiceError: `DATASET_INVALID`, they are more than were announced.
            OSError: The disk does not take them.
        """
        with self._lock:
            self._size += len(data)
            if self._size > self.shard.byte_count:
                raise self._wrong(f"more than the announced {self.shard.byte_count:,} bytes came")
            self._digest.update(data)
            view = memoryview(data)
            while view:
                view = view[os.write(self._open_descriptor(), view) :]

    def check(self, max_pixels: int) -> None:
        """Compare it with what was announced, and look into it.

        Raises:
            ServiceError: `DATASET_INVALID`.
            OSError: It cannot be read.
        """
        with self._lock:
            if self._size != self.shard.byte_count:
                raise self._wrong(f"{self._size:,} of {self.shard.byte_count:,} bytes came")
            if self._digest.hexdigest() != self.shard.sha256:
                raise self._wrong("its bytes have another sha256")
            count, _ = inspect(self._open_descriptor())
            if count != self.shard.sample_count:
                raise self._wrong(f"it has {count:,} samples, {self.shard.sample_count:,} were announced")
            check_images(self._open_descriptor(), max_pixels)

    def keep(self, own: Path, pool: Path) -> None:
        """Give it its place, durably; see Note: [One content, many owners].

        Args:
            own: Its name in its owner's folder.
            pool: Its name among those of all owners.

        Raises:
            OSError: It has no place.
        """
        with self._lock:
            if not is_whole(own, self.shard):
                os.fsync(self._open_descriptor())
                self._place(own, pool)

    def _place(self, own: Path, pool: Path) -> None:
        try:
            if is_whole(pool, self.shard):
                self._path.unlink()
                os.link(pool, self._path)
            else:
                _link(self._path, pool)
            self._path.replace(own)
            sync_folder(own.parent)
            sync_folder(pool.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                own.unlink(missing_ok=True)
            self._path.unlink(missing_ok=True)
            drop_unused(pool)
            raise

    def close(self) -> None:
        """Remove what was not kept."""
        with self._lock:
            if self._descriptor >= 0:
                with contextlib.suppress(OSError):
                    self._path.unlink(missing_ok=True)
                os.close(self._descriptor)
                self._descriptor = -1

    def _open_descriptor(self) -> int:
        if self._descriptor < 0:
            raise OSError(errno.EBADF, "the shard is closed")
        return self._descriptor

    def _wrong(self, problem: str) -> ServiceError:
        return ServiceError(
            ErrorReason.DATASET_INVALID,
            f"shard {self.shard.sha256[:12]} is not as announced: {problem}; begin the upload again",
        )


def is_whole(path: Path, shard: Shard) -> bool:
    """Tell whether a file is there and is this very shard; reads all of it.

    Raises:
        OSError: It is there and cannot be read.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != shard.byte_count:
                return False
            return hashlib.file_digest(file, "sha256").hexdigest() == shard.sha256
    except FileNotFoundError:
        return False


def drop_unused(pool: Path) -> None:
    """Remove a name from the pool that is the only one of its file."""
    with contextlib.suppress(OSError):
        if pool.stat().st_nlink == 1:
            pool.unlink()


def _link(path: Path, pool: Path) -> None:
    """Put a file into the pool, in place of one that is damaged; not where there are no hard links."""
    pool.unlink(missing_ok=True)
    try:
        os.link(path, pool)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
