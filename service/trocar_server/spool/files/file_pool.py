"""File pool: space for the next block, free files, and when disk space is released.

# Note: [One lock over the folder]
A spool may be dropped at any time, by the garbage collector, on any thread: also while its writer makes the
folder, or gives a file its name. So all that changes the folder is done under one lock, and `abandon`, which
the finalizer calls, waits for none: it leaves a mark. The holder of the lock looks for the mark when giving
it back, and removes what is there by then. Pools that have a folder, or may be making one, are known to the
process until they have none, so that the process can wait for their writers when it ends: they are daemon
threads, which would be stopped anywhere.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trocar_server.spool.files.chunks import HEADER_BYTES, UNPUBLISHED, ChunkFile
from trocar_server.spool.files.direct_memory import PAGE_BYTES, padded
from trocar_server.spool.files.directory import SpoolDirectory
from trocar_server.spool.files.header import Item
from trocar_server.spool.spool_errors import SpoolError, SpoolFullError, write_error

_CHUNK_BYTES = 64 << 20
_LARGEST_CHUNK_BYTES = 1 << 30
_CHUNKS_OF_A_SIZE = 8
"""Then files get twice as large: a hundred gigabytes need no thousand open files."""
_IDLE_FILES = 2
_IDLE_S = 5.0

_WITH_FOLDERS: "set[ChunkPool]" = set()
_ENDING = threading.Event()


class ChunkPool:
    """Allocates space for blocks in files, and frees it when they have no references.

    Its methods are for any thread, but only one places blocks.

    Args:
        parent: Where the process's own folder is made.
        quota_bytes: The most bytes of files; None for no limit.
        note: Takes notes for the owner.
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
        """Allocate space for a block; returns the file and the offset there.

        Raises:
            SpoolError: There is no room within the quota, or no file can be made.
        """
        needed = padded(phase + item.byte_count)
        with self._locked():
            self._idle_since = None
            if self._is_closed:
                raise SpoolError("the spool is closed: nothing more can be saved")
            chunk = self._open
            if chunk is None or not (chunk.has_room(needed, item) and chunk.withdraw()):
                chunk = self._next(needed)
            return chunk, self._placed(chunk, item, phase)

    def leave(self, chunk: ChunkFile) -> None:
        """Free one block of a file."""
        with self._locked():
            chunk.live -= 1
            if chunk.live == 0:
                self._recycle(chunk)

    def condemn(self, chunk: ChunkFile | None = None) -> None:
        """After a fault: remove a file after its last block, or all files, and future ones."""
        with self._locked():
            self._is_failing = self._is_failing or chunk is None
            for doomed in self._used if chunk is None else [chunk]:
                doomed.is_condemned = True
            if self._open is not None and self._open.is_condemned:
                self._open = None
            self._remove_free()
            for doomed in [c for c in self._used if c.is_condemned and c.live == 0]:
                self._recycle(doomed)

    def forgive(self) -> None:
        """Begin a new step after a fault: its files may be reused."""
        self._is_failing = False

    def drop_free(self) -> bool:
        """Remove unused files to free their space; False where there were none."""
        with self._locked():
            had_any = bool(self._free)
            self._remove_free()
            return had_any

    def rest(self, now: float) -> None:
        """Say that nothing is written at present: publish the open file, and in the end give room back.

        Raises:
            OSError: The disk is full or failing.
        """
        with self._locked():
            if not self._used:
                self._give_back(now)
            if self._open is not None:
                self._open.publish()

    def forget(self) -> None:
        """Forget all files without touching the disk, in a forked process: its parent owns them."""
        self._lock = threading.Lock()
        for chunk in (*self._used, *self._free):
            chunk.forget()
        if self._directory is not None:
            self._directory.forget()
        self._directory, self._open, self._used, self._free = None, None, [], []
        _WITH_FOLDERS.discard(self)

    def close(self) -> None:
        """Remove all files and the folder; waits while one is made."""
        with self._locked():
            self._is_closed = True
            self._remove_all()

    def abandon(self) -> None:
        """Do as `close`, but wait for no lock; see Note: [One lock over the folder]."""
        self._is_closed = True
        self._sweep()

    # --- under the lock ---------------------------------------------------------------------------

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, and look for the mark when giving it back."""
        try:
            with self._lock:
                yield
        finally:
            if self._is_closed:
                self._sweep()

    def _sweep(self) -> None:
        """Remove what is there if the lock is free; its holder does it otherwise."""
        while (self._used or self._free or self._directory) and self._lock.acquire(blocking=False):
            try:
                self._remove_all()
            finally:
                self._lock.release()

    def _remove_all(self) -> None:
        for chunk in (*self._used, *self._free):
            chunk.remove()
        self._open, self._used, self._free = None, [], []
        if self._directory is not None:
            self._directory.close()
            self._directory = None
        _WITH_FOLDERS.discard(self)

    def _recycle(self, chunk: ChunkFile) -> None:
        if chunk not in self._used:  # closed in the meantime
            return
        self._used.remove(chunk)
        if chunk is self._open:
            self._open = None
        if chunk.is_condemned or not (chunk.is_whole() and chunk.withdraw()):
            chunk.remove()
        else:
            chunk.reset(chunk.size)
            self._free.append(chunk)

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

    def _next(self, needed: int) -> ChunkFile:
        """Publish the open file, and open another one."""
        sealed, self._open = self._open, None
        try:
            if sealed is not None:
                sealed.publish()
            chunk = self._take_free(needed) or self._create(needed)
        except OSError as error:
            raise write_error(error) from error
        self._used.append(chunk)
        self._open = chunk
        chunk.is_condemned = chunk.is_condemned or self._is_failing
        return chunk

    def _take_free(self, needed: int) -> ChunkFile | None:
        """Return the largest free file that can take a block, or be made to."""
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
        room = self._room()
        while self._free and room is not None and room < needed:
            self._free.pop().remove()
            room = self._room()
        if room is not None and room < needed:
            raise SpoolFullError(
                f"saved tensors would take over {self._quota:,} bytes on disk, the quota of this spool"
            )
        usual = max(self._usual_capacity(), needed)
        return self._new_file(usual if room is None else min(usual, room))

    def _new_file(self, capacity: int) -> ChunkFile:
        self._number += 1
        chunk = ChunkFile.create(self._folder() / f"file-{self._number:06d}{UNPUBLISHED}", capacity)
        try:
            chunk.reserve_header()
        except OSError:
            chunk.remove()
            raise
        if not chunk.is_direct:
            self._note("the filesystem has no direct I/O: writes also fill the page cache")
        return chunk

    def _folder(self) -> Path:
        if self._directory is not None and not self._directory.exists():  # deleted from outside
            self._directory.forget()
            self._directory = None
        if self._directory is None:
            _WITH_FOLDERS.add(self)  # before it looks whether the process ends: see `close_pools`
            if _ENDING.is_set():
                raise SpoolError("the process is ending: nothing more can be saved")
            self._directory = SpoolDirectory(self._parent)
        return self._directory.path


def close_pools() -> None:
    """Remove the folders of all spools of this process, which makes no others from now on."""
    _ENDING.set()
    for pool in list(_WITH_FOLDERS):
        pool.close()


def forget_pools() -> None:
    """Forget all folders without removing them, in a forked process."""
    for pool in list(_WITH_FOLDERS):
        pool.forget()
