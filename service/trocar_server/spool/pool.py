"""The files of a spool: which one takes the next block, which are free, when their room is given back."""

import threading
from collections.abc import Callable
from pathlib import Path

from trocar_server.spool.chunks import HEADER_BYTES, ChunkFile
from trocar_server.spool.directory import SpoolDirectory
from trocar_server.spool.errors import SpoolError, SpoolFullError, write_error
from trocar_server.spool.header import Item
from trocar_server.spool.memory import PAGE_BYTES, padded

_CHUNK_BYTES = 64 << 20
_LARGEST_CHUNK_BYTES = 1 << 30
_CHUNKS_OF_A_SIZE = 8
"""Then files get twice as large: a hundred gigabytes need no thousand open files."""
_IDLE_FILES = 2
_IDLE_S = 5.0


class ChunkPool:
    """Gives blocks room in files, and takes it back when nobody needs them.

    Its methods are for any thread, but only one places blocks.

    Args:
        parent: Where the process's own folder is made.
        quota_bytes: The most bytes of files; None for no limit.
        note: Takes what the owner should know.
    """

    def __init__(
        self, parent: Path, quota_bytes: int | None = None, note: Callable[[str], None] = lambda _: None
    ) -> None:
        self.peak_files = self.peak_bytes = 0
        self._parent, self._quota, self._note = parent, quota_bytes, note
        self._lock = threading.Lock()
        self._directory: SpoolDirectory | None = None
        self._open: ChunkFile | None = None
        self._used: list[ChunkFile] = []
        self._free: list[ChunkFile] = []
        self._number = 0
        self._idle_since: float | None = None
        self._is_closed = self._is_failing = False

    @property
    def file_count(self) -> int:
        """Files at present."""
        with self._lock:
            return len(self._used) + len(self._free)

    def place(self, item: Item, phase: int) -> tuple[ChunkFile, int]:
        """Take room for a block; returns the file and the offset there.

        Raises:
            SpoolError: There is no room within the quota, or no file can be made.
        """
        needed = padded(phase + item.byte_count)
        with self._lock:
            self._idle_since = None
            chunk = self._open
            if self._is_closed:
                raise SpoolError("the spool is closed: nothing more can be saved")
            if chunk is not None and chunk.has_room(needed, item):
                return chunk, self._placed(chunk, item, phase)
        self._seal()
        chunk = self._take_free(needed) or self._create(needed)
        with self._lock:
            self._used.append(chunk)
            self._open = chunk
            chunk.is_condemned = chunk.is_condemned or self._is_failing
            return chunk, self._placed(chunk, item, phase)

    def leave(self, chunk: ChunkFile) -> None:
        """Say that one block of a file is needed no more."""
        with self._lock:
            chunk.live -= 1
            if chunk.live == 0:
                self._recycle(chunk)

    def condemn(self, chunk: ChunkFile | None = None) -> None:
        """After a fault: let a file go when nobody needs it, or all of them, and those to come."""
        with self._lock:
            self._is_failing = self._is_failing or chunk is None
            for doomed in self._used if chunk is None else [chunk]:
                doomed.is_condemned = True
            if self._open is not None and self._open.is_condemned:
                self._open = None
            self._remove_free()
            for doomed in [c for c in self._used if c.is_condemned and c.live == 0]:
                self._recycle(doomed)

    def forgive(self) -> None:
        """Say that a new step begins, behind a fault: its files may be used again."""
        self._is_failing = False

    def drop_free(self) -> bool:
        """Remove the files that nobody needs, for their room; False where there were none."""
        with self._lock:
            had_any = bool(self._free)
            self._remove_free()
            return had_any

    def rest(self, now: float) -> None:
        """Say that nothing is written at present: headers are, and in the end room is given back.

        Raises:
            OSError: The disk is full or failing.
        """
        with self._lock:
            if not self._used:
                self._give_back(now)
            chunk = self._pinned()
        self._name(chunk)

    def forget(self) -> None:
        """Let go of everything without touching the disk, in a forked process: its parent owns the files."""
        for chunk in (*self._used, *self._free):
            chunk.forget()
        if self._directory is not None:
            self._directory.forget()
        self._lock = threading.Lock()
        self._directory, self._open, self._used, self._free = None, None, [], []

    def close(self) -> None:
        """Remove all files and the folder."""
        with self._lock:
            self._is_closed = True
            for chunk in (*self._used, *self._free):
                chunk.remove()
            self._open, self._used, self._free = None, [], []
            if self._directory is not None:
                self._directory.close()
                self._directory = None

    # --- under the lock ---------------------------------------------------------------------------

    def _recycle(self, chunk: ChunkFile) -> None:
        if chunk not in self._used:  # closed in the meantime
            return
        self._used.remove(chunk)
        if chunk is self._open:
            self._open = None
        if chunk.is_condemned or not chunk.is_whole():
            chunk.remove()
        else:
            chunk.reset(chunk.size)
            self._free.append(chunk)

    def _pinned(self) -> ChunkFile | None:
        """Return the open file, not to be recycled before it is left."""
        if self._open is not None:
            self._open.live += 1
        return self._open

    def _give_back(self, now: float) -> None:
        if self._idle_since is None:
            self._idle_since = now
        if now - self._idle_since >= _IDLE_S:
            self._remove_free(_IDLE_FILES)

    def _remove_free(self, but: int = 0) -> None:
        for chunk in self._free[but:]:
            chunk.remove()
        del self._free[but:]

    def _disk_bytes(self) -> int:
        """What the files take, and the open one may."""
        sizes = (c.capacity if c is self._open else c.size for c in (*self._used, *self._free))
        return sum(HEADER_BYTES + size for size in sizes)

    def _placed(self, chunk: ChunkFile, item: Item, phase: int) -> int:
        offset = chunk.place(item, phase)
        self.peak_files = max(self.peak_files, len(self._used) + len(self._free))
        sizes = (c.size for c in (*self._used, *self._free))
        self.peak_bytes = max(self.peak_bytes, sum(HEADER_BYTES + size for size in sizes))
        return offset

    def _room(self) -> int | None:
        """Bytes that one more file may take, whole pages; None for no limit."""
        if self._quota is None:
            return None
        return (self._quota - self._disk_bytes() - HEADER_BYTES) // PAGE_BYTES * PAGE_BYTES

    def _usual_capacity(self) -> int:
        return min(_CHUNK_BYTES << (len(self._used) // _CHUNKS_OF_A_SIZE), _LARGEST_CHUNK_BYTES)

    # --- the one thread that places blocks ---------------------------------------------------------

    def _seal(self) -> None:
        with self._lock:
            chunk, self._open = self._pinned(), None
        try:
            self._name(chunk)
        except OSError as error:
            raise write_error(error) from error

    def _name(self, chunk: ChunkFile | None) -> None:
        if chunk is not None:
            try:
                chunk.name_tensors()
            finally:
                self.leave(chunk)

    def _take_free(self, needed: int) -> ChunkFile | None:
        """Return the largest free file that can take a block, or be made to."""
        with self._lock:
            usual = max(self._usual_capacity(), needed)
            room = self._room()
            growth = usual if room is None else max(room + HEADER_BYTES, 0)
            for chunk in sorted(self._free, key=lambda free: -free.size):
                capacity = max(chunk.size, min(usual, chunk.size + growth))
                if capacity >= needed:
                    self._free.remove(chunk)
                    chunk.reset(capacity)
                    return chunk
            return None

    def _create(self, needed: int) -> ChunkFile:
        with self._lock:
            room = self._room()
            while self._free and room is not None and room < needed:
                self._free.pop().remove()
                room = self._room()
            if room is not None and room < needed:
                raise SpoolFullError(
                    f"saved tensors would take over {self._quota:,} bytes on disk, the quota of this spool"
                )
            usual = max(self._usual_capacity(), needed)
        try:
            return self._new_file(usual if room is None else min(usual, room))
        except OSError as error:
            raise write_error(error) from error

    def _new_file(self, capacity: int) -> ChunkFile:
        if self._directory is None or not self._directory.exists():
            self._directory = SpoolDirectory(self._parent)
        self._number += 1
        chunk = ChunkFile.create(self._directory.path / f"{self._number:08d}.safetensors", capacity)
        try:
            chunk.name_tensors()  # takes the room for it
        except OSError:
            chunk.remove()
            raise
        if not chunk.is_direct:
            self._note("the filesystem has no direct I/O: what is written also fills the page cache")
        return chunk
