"""Incoming shards: receiving, checking and storing them.

# Note: [Deduplicated shards]
A shard is stored in its owner's folder, and looked up nowhere else: callers may use only what they have sent.
Equal bytes of several owners are one file with several hard links, the first of them in the pool. A new
upload is compared with the pooled file before its own copy is dropped. A pooled file without other links is
unreferenced and is deleted. On a file system without hard links every owner has a copy.
"""

import contextlib
import hashlib
import os
from pathlib import Path
from threading import Lock

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.storage.durable import PartialFile, link_durably, remove_quietly
from trocar_server.training.datasets.dataset_schema import Shard
from trocar_server.training.datasets.inspection import check_encoded, inspect


class IncomingShard:
    """A shard being received; `close` removes it unless it was kept.

    Thread-safe: one thread may close it while another still writes for a cancelled call.

    Args:
        folder: Folder of the partial file.
        shard: Its description in the manifest.

    Raises:
        OSError: The file cannot be created.
    """

    def __init__(self, folder: Path, shard: Shard) -> None:
        self.shard = shard
        self._lock = Lock()
        self._file = PartialFile(folder)
        self._digest = hashlib.sha256()
        self._size = 0

    def write(self, data: bytes) -> None:
        """Append bytes.

        Raises:
            ServiceError: `DATASET_INVALID`, more bytes than announced.
            OSError: The disk write failed.
        """
        with self._lock:
            self._size += len(data)
            if self._size > self.shard.byte_count:
                raise self._wrong(f"more than the announced {self.shard.byte_count:,} bytes were received")
            self._digest.update(data)
            self._file.write(data)

    def check(self, max_pixels: int) -> None:
        """Compare it with the manifest, and validate its contents.

        Raises:
            ServiceError: `DATASET_INVALID`.
            OSError: It cannot be read.
        """
        with self._lock:
            if self._size != self.shard.byte_count:
                raise self._wrong(f"{self._size:,} of {self.shard.byte_count:,} bytes were received")
            if self._digest.hexdigest() != self.shard.sha256:
                raise self._wrong("its sha256 does not match")
            count, _ = inspect(self._file.descriptor)
            if count != self.shard.sample_count:
                raise self._wrong(f"it has {count:,} samples, {self.shard.sample_count:,} were announced")
            check_encoded(self._file.descriptor, max_pixels)

    def keep(self, own: Path, pool: Path) -> None:
        """Move it to its final place, durably; see Note: [Deduplicated shards].

        Args:
            own: Its path in its owner's folder.
            pool: Its path in the pool.

        Raises:
            OSError: Storing it failed.
        """
        with self._lock:
            if not is_whole(own, self.shard):
                self._place(own, pool)

    def _place(self, own: Path, pool: Path) -> None:
        try:
            if is_whole(pool, self.shard) and link_durably(pool, own):
                return
            self._file.sync()
            link_durably(self._file.path, pool)
            self._file.publish(own)
        except BaseException:
            remove_quietly(own)
            self._file.close()  # before its second name is looked at
            drop_unused(pool)
            raise

    def close(self) -> None:
        """Remove the partial file, unless it was kept."""
        with self._lock:
            self._file.close()

    def _wrong(self, problem: str) -> ServiceError:
        return ServiceError(
            ErrorReason.DATASET_INVALID,
            f"shard {self.shard.sha256[:12]} does not match the manifest: {problem}; begin the upload again",
        )


def is_whole(path: Path, shard: Shard) -> bool:
    """Whether a file exists and is exactly this shard; reads all of it.

    Raises:
        OSError: It exists and cannot be read.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != shard.byte_count:
                return False
            return hashlib.file_digest(file, "sha256").hexdigest() == shard.sha256
    except FileNotFoundError:
        return False


def drop_unused(pool: Path) -> None:
    """Remove a pooled file that has no other links."""
    with contextlib.suppress(OSError):
        if pool.stat().st_nlink == 1:
            pool.unlink()
