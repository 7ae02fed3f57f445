"""Segment: memory that two processes share."""

import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.shared_memory.folder import create_file, remove_name

_PIECE_BYTES = 4 << 20
_PAGE_BYTES = mmap.PAGESIZE


class Segment:
    """Shared memory under a random name, every page of it there from the start.

    Not closed before the last borrower has ended. Reading and writing are safe from any thread.

    Args:
        folder: The folder of shared memory.
        byte_count: Its size in bytes; rounded up to whole pages.
        when_freed: Called when the last borrower has ended.

    Raises:
        OSError: There is too little room, or the file cannot be made.
    """

    def __init__(self, folder: Path, byte_count: int, when_freed: Callable[[], None] = lambda: None) -> None:
        self.byte_count = rounded(byte_count)
        self._folder, self._when_freed = folder, when_freed
        self.name, self._descriptor = create_file(folder)
        self.id = self.name.rpartition("-")[2]
        try:
            # A sparse file would raise SIGBUS later if the folder is full; this fails at once instead.
            os.posix_fallocate(self._descriptor, 0, self.byte_count)
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._map = mmap.mmap(self._descriptor, self.byte_count, flags)
        except BaseException:
            remove_name(folder, self.name)
            os.close(self._descriptor)
            raise
        self.has_name = True
        self.is_ready = False
        self.used_at_s = 0.0
        self._users = 1
        self._lock = Lock()
        self._is_written = Lock()

    @property
    def descriptor(self) -> int:
        """The descriptor of its file; open as long as the segment has a user."""
        return self._descriptor

    @property
    def is_borrowed(self) -> bool:
        """Whether a call uses it, beside its stream."""
        with self._lock:
            return self._users > 1

    def remove_name(self) -> None:
        """Unlink its name: from now on no other process can map it."""
        if self.has_name:
            self.has_name = False
            remove_name(self._folder, self.name)

    def read(self, offset: int, out: NDArray[np.uint8]) -> None:
        """Copy bytes out of it; see Note: [Concurrent writes to shared memory].

        Raises:
            ServiceError: `INVALID_ARGUMENT`, it was truncated.
        """
        for start in range(0, out.nbytes, _PIECE_BYTES):
            piece = out[start : start + _PIECE_BYTES]
            np.copyto(piece, self._view(offset + start, piece.nbytes))

    def write(self, offset: int, data: NDArray[np.uint8]) -> None:
        """Copy bytes into it.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, it was truncated.
        """
        for start in range(0, data.nbytes, _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            np.copyto(self._view(offset + start, piece.nbytes), piece)

    def claim(self) -> bool:
        """Claim it for one writer; False where another one has it."""
        return self._is_written.acquire(blocking=False)

    def unclaim(self) -> None:
        """Release a claim."""
        self._is_written.release()

    def retain(self) -> bool:
        """Add a reference; False if the last one was released."""
        with self._lock:
            if self._users:
                self._users += 1
            return self._users > 0

    def release(self) -> None:
        """Drop a reference; the last one frees the memory."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
        self.remove_name()
        with suppress(BufferError):  # a copy that failed is still in somebody's traceback: freed with that
            self._map.close()
        os.close(self._descriptor)
        self._when_freed()

    def _view(self, offset: int, byte_count: int) -> NDArray[np.uint8]:
        if os.fstat(self._descriptor).st_size < self.byte_count:
            raise ServiceError(ErrorReason.INVALID_ARGUMENT, "the shared memory segment was truncated")
        return np.frombuffer(self._map, np.uint8, byte_count, offset)


def rounded(byte_count: int) -> int:
    """Return the bytes of whole pages."""
    return -(-byte_count // _PAGE_BYTES) * _PAGE_BYTES
