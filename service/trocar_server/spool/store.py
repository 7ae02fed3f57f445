"""Blocks in memory and on disk, within a budget: one writer and one reader thread.

All state is under one lock. Packing threads add blocks, and wait while memory is over the budget; the writer takes the
oldest. Unpacking threads ask for blocks, newest first, and the reader brings what comes next.

# Note: [What cannot stay]
Backward needs the newest blocks first. So of a step whose blocks come to T bytes the first T - budget are written, and
the rest never is. T is known from the step before; in the first step blocks are written when memory runs over.
"""

import mmap
import threading
import time
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

from trocar_server.spool.chunks import ChunkFile, padded
from trocar_server.spool.directory import SpoolDirectory
from trocar_server.spool.entries import IN_MEMORY, Block, Report, State
from trocar_server.spool.errors import SpoolError, SpoolFullError
from trocar_server.spool.memory import aligned_buffer, as_storage, storage_bytes

_PIECE_BYTES = 4 << 20
_CHUNK_BYTES = 64 << 20
_FREE_CHUNKS = 64


class BlockStore:
    """Keeps blocks within a budget; see the module.

    Args:
        parent: Where the process's own folder is made.
        budget_bytes: The most bytes of blocks in memory, but for the largest one.
        ahead_bytes: The most bytes that are read ahead.
        quota_bytes: The most bytes of files; None for no limit.
    """

    def __init__(
        self, parent: Path, budget_bytes: int, ahead_bytes: int, quota_bytes: int | None = None
    ) -> None:
        self.report = Report()
        self._parent = parent
        self._budget = budget_bytes
        self._ahead = ahead_bytes
        self._quota = quota_bytes
        self._lock = threading.Condition(threading.RLock())
        self._held: dict[int, Block] = {}  # in memory, by number: oldest first
        self._queue: deque[Block] = deque()
        self._stored: list[Block] = []  # by number
        self._loaded: dict[int, Block] = {}
        self._released: deque[Block] = deque()  # from __del__, which must take no lock
        self._held_bytes = self._loaded_bytes = self._disk_bytes = 0
        self._number = 0
        self._largest = 0
        self._cursor = 0
        self._step_bytes = self._last_step_bytes = 0
        self._is_backward = False
        self._error: BaseException | None = None
        self._directory: SpoolDirectory | None = None
        self._chunks: list[ChunkFile] = []
        self._free: list[ChunkFile] = []
        self._open: ChunkFile | None = None
        self._is_closed = False
        self._threads: list[threading.Thread] = []

    def begin_step(self) -> None:
        """Note that a forward pass begins."""
        with self._lock:
            self._collect()
            self._is_backward = False
            self.report.step_count += 1

    def end_step(self) -> None:
        """Note that a forward pass has ended: the size of its blocks is known."""
        with self._lock:
            self._last_step_bytes, self._step_bytes = self._step_bytes, 0

    def add(self, block: Block) -> None:
        """Take a new block; waits while memory is over the budget.

        Raises:
            SpoolError: The writer has failed since.
        """
        with self._lock:
            self._collect()
            self._raise_error()
            self._number += 1
            block.number, block.users = self._number, 1
            self._held[block.number] = block
            self._held_bytes += block.byte_count
            self._largest = max(self._largest, block.byte_count)
            self.report.unique_bytes += block.byte_count
            self._step_bytes += block.byte_count
            self._is_backward = False
            if self._step_bytes <= self._last_step_bytes - self._budget:  # see Note: [What cannot stay]
                self._enqueue(block)
            self._make_room()
            self._measure()
            self._wait(
                lambda: self._held_bytes <= self._budget + block.byte_count or not self._queue_is_busy()
            )
            self._raise_error()

    def adopt(self, block: Block) -> bool:
        """Take another user of a block; False when it is gone."""
        with self._lock:
            self._collect()
            if block.state is State.GONE:
                return False
            block.users += 1
            return True

    def get(self, block: Block) -> tuple[torch.UntypedStorage, int]:
        """Return the bytes of a block, from memory or from disk.

        Raises:
            SpoolError: They cannot be brought back.
        """
        with self._lock:
            self._collect()
            if not self._is_backward:
                self._is_backward = True
                self._take_back_queue()
            self._cursor = block.number
            if block.state is State.STORED:
                self._read_now(block)
            self._wait(lambda: block.state is not State.READING)
            if block.error is not None:
                error, block.error = block.error, None
                raise error
            storage = block.storage
            assert storage is not None
            self._lock.notify_all()  # the reader may go on behind it
            return storage, block.start

    def release(self, block: Block) -> None:
        """Say that a user of a block is gone. Takes no lock: it may be called by the garbage collector."""
        self._released.append(block)

    def close(self) -> None:
        """Stop the threads and remove the files."""
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=10)
        with self._lock:
            for chunk in (*self._chunks, *self._free):
                chunk.remove()
            self._chunks, self._free, self._open = [], [], None
            if self._directory is not None:
                self._directory.close()
                self._directory = None

    # --- under the lock ---------------------------------------------------------------------------

    def _collect(self) -> None:
        """Take away blocks that nobody needs any more."""
        while self._released:
            block = self._released.popleft()
            block.users -= 1
            if block.users == 0:
                self._drop(block)

    def _drop(self, block: Block) -> None:
        if block.state in IN_MEMORY:
            self._held.pop(block.number, None)
            self._held_bytes -= block.byte_count
        if block.state in (State.LOADED, State.READING):
            self._unload(block)
        was_writing = block.state is State.WRITING
        block.state, block.storage = State.GONE, block.storage if was_writing else None
        if block.chunk is not None and not was_writing:
            self._leave_chunk(block)
        self._lock.notify_all()

    def _leave_chunk(self, block: Block) -> None:
        chunk, block.chunk = block.chunk, None
        assert chunk is not None
        chunk.live -= 1
        if chunk.live == 0 and chunk is not self._open:
            self._recycle(chunk)

    def _recycle(self, chunk: ChunkFile) -> None:
        self._chunks.remove(chunk)
        chunk.reset()
        if len(self._free) < _FREE_CHUNKS:
            self._free.append(chunk)
        else:
            self._disk_bytes -= chunk.capacity
            chunk.remove()

    def _unload(self, block: Block) -> None:
        if self._loaded.pop(block.number, None) is not None:
            self._loaded_bytes -= block.byte_count

    def _enqueue(self, block: Block) -> None:
        if block.state is State.HELD:
            block.state = State.QUEUED
            self._queue.append(block)
            self._start_threads()
            self._lock.notify_all()

    def _make_room(self) -> None:
        """Queue the oldest blocks until what stays fits."""
        pending = sum(block.byte_count for block in self._queue if block.state is State.QUEUED)
        excess = self._held_bytes - pending - self._budget
        if excess <= 0:
            return
        for block in list(self._held.values()):
            if excess <= 0:
                return
            if block.state is State.HELD:
                excess -= block.byte_count
                self._enqueue(block)

    def _take_back_queue(self) -> None:
        """Backward has begun: what is still in memory is used from there."""
        room = self._budget - sum(b.byte_count for b in self._held.values() if b.state is State.HELD)
        for block in reversed(self._queue):
            if block.state is State.QUEUED and block.byte_count <= room:
                block.state = State.HELD
                room -= block.byte_count

    def _queue_is_busy(self) -> bool:
        return any(block.state in (State.QUEUED, State.WRITING) for block in self._held.values())

    def _measure(self) -> None:
        self.report.peak_bytes = max(self.report.peak_bytes, self._held_bytes + self._loaded_bytes)

    def _wait(self, is_ready: Callable[[], bool]) -> None:
        if is_ready():
            return
        started = time.perf_counter()
        self._lock.wait_for(lambda: is_ready() or self._error is not None or self._is_closed)
        self.report.stall_count += 1
        self.report.stall_s += time.perf_counter() - started

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _start_threads(self) -> None:
        if self._threads:
            return
        me = weakref.ref(self)
        for work, name in ((_write_forever, "writer"), (_read_forever, "reader")):
            thread = threading.Thread(target=work, args=(me, self._lock), name=f"spool-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _read_now(self, block: Block) -> None:
        """Read a block that nobody has begun to read, in this thread."""
        self._begin_reading(block)
        started = time.perf_counter()
        self._lock.release()
        try:
            self._load(block)
        finally:
            self._lock.acquire()
        self.report.stall_count += 1
        self.report.stall_s += time.perf_counter() - started

    def _begin_reading(self, block: Block) -> None:
        block.state = State.READING
        self._loaded[block.number] = block
        self._loaded_bytes += block.byte_count
        self._forget_loaded(block)
        self._measure()

    def _forget_loaded(self, newest: Block) -> None:
        """Let go of what was read, where there is too much: it is on disk still."""
        for block in list(self._loaded.values()):
            if self._loaded_bytes <= max(self._ahead, newest.byte_count):
                return
            if block.state is State.LOADED and block.number > self._cursor:  # used before
                self._unload(block)
                block.state, block.storage = State.STORED, None

    def _next_to_read(self) -> Block | None:
        """Return the newest stored block before the one that was asked for last, if there is room."""
        if not self._is_backward:
            return None
        index = bisect_left(self._stored, self._cursor, key=lambda block: block.number)
        for position in range(index - 1, -1, -1):
            block = self._stored[position]
            if block.state is State.STORED:
                room = min(self._ahead, self._budget - self._held_bytes) - self._loaded_bytes
                return block if block.byte_count <= room else None
        return None

    def _next_to_write(self) -> Block | None:
        while self._queue:
            block = self._queue.popleft()
            if block.state is State.QUEUED:
                return block
        return None

    # --- on the threads ---------------------------------------------------------------------------

    def _write(self, block: Block, staging: mmap.mmap) -> None:
        try:
            with self._lock:
                chunk = self._chunk_for(block)
                block.chunk = chunk
                block.offset = chunk.place(f"{block.number}", block.byte_count)
                storage = block.storage
            assert storage is not None
            chunk.write(block.offset, storage_bytes(storage, block.byte_count), staging)
            with self._lock:
                self._written(block)
        except BaseException as error:  # noqa: BLE001 - it comes out of forward or backward
            with self._lock:
                self._not_written(block, error)

    def _written(self, block: Block) -> None:
        self.report.written_bytes += padded(block.byte_count)
        block.storage = None
        if block.state is State.GONE:
            self._leave_chunk(block)
        else:
            self._held.pop(block.number, None)
            self._held_bytes -= block.byte_count
            block.state = State.STORED
            index = bisect_left(self._stored, block.number, key=lambda stored: stored.number)
            self._stored.insert(index, block)
            if len(self._stored) > 2 * (sum(b.state is not State.GONE for b in self._stored) + 64):
                self._stored = [stored for stored in self._stored if stored.state is not State.GONE]
        self._lock.notify_all()

    def _not_written(self, block: Block, error: BaseException) -> None:
        if block.chunk is not None:
            self._leave_chunk(block)
        if block.state is State.WRITING:
            block.state = State.HELD
        elif block.state is State.GONE:
            block.storage = None
        for queued in self._queue:
            if queued.state is State.QUEUED:
                queued.state = State.HELD
        self._queue.clear()
        self._error = error if isinstance(error, SpoolError) else SpoolError(str(error))
        self._lock.notify_all()

    def _chunk_for(self, block: Block) -> ChunkFile:
        if self._open is not None and self._open.has_room(block.byte_count):
            return self._open
        if self._open is not None:
            sealed, self._open = self._open, None
            sealed.seal()
            if sealed.live == 0:
                self._recycle(sealed)
        needed = padded(block.byte_count)
        chunk = next((free for free in self._free if free.capacity >= needed), None)
        if chunk is not None:
            self._free.remove(chunk)
        else:
            chunk = self._new_chunk(max(_CHUNK_BYTES, needed))
        self._chunks.append(chunk)
        self._open = chunk
        self.report.file_count = max(self.report.file_count, len(self._chunks) + len(self._free))
        return chunk

    def _new_chunk(self, capacity: int) -> ChunkFile:
        while self._free and self._quota is not None and self._disk_bytes + capacity > self._quota:
            dropped = self._free.pop()
            self._disk_bytes -= dropped.capacity
            dropped.remove()
        if self._quota is not None and self._disk_bytes + capacity > self._quota:
            raise SpoolFullError(
                f"saved tensors would take over {self._quota:,} bytes on disk, the quota of this spool"
            )
        if self._directory is None:
            self._directory = SpoolDirectory(self._parent)
        chunk = ChunkFile.create(self._directory.path / f"{self._number:08d}.safetensors", capacity)
        self._disk_bytes += capacity
        return chunk

    def _load(self, block: Block) -> None:
        """Read a block that is in state READING."""
        error: BaseException | None = None
        storage, start = None, 0
        try:
            raw, start = aligned_buffer(block.byte_count)
            assert block.chunk is not None
            size = padded(block.byte_count)
            block.chunk.read(block.offset, memoryview(raw)[start : start + size])
            storage = as_storage(raw)
        except BaseException as raised:  # noqa: BLE001 - it comes out of backward
            error = raised if isinstance(raised, SpoolError) else SpoolError(str(raised))
        with self._lock:
            self.report.read_bytes += padded(block.byte_count)
            if block.state is State.READING:
                block.storage, block.start, block.error = storage, start, error
                block.state = State.LOADED if error is None else State.STORED
                if error is not None:
                    self._unload(block)
            self._lock.notify_all()


def _write_forever(me: "weakref.ref[BlockStore]", lock: threading.Condition) -> None:
    staging = mmap.mmap(-1, _PIECE_BYTES)
    while True:
        with lock:
            store = me()
            if store is None or store._is_closed:
                return
            block = store._next_to_write()
            if block is None:
                del store
                lock.wait(timeout=1)
                continue
            block.state = State.WRITING
        store._write(block, staging)
        del store, block


def _read_forever(me: "weakref.ref[BlockStore]", lock: threading.Condition) -> None:
    while True:
        with lock:
            store = me()
            if store is None or store._is_closed:
                return
            store._collect()
            block = store._next_to_read()
            if block is None:
                del store
                lock.wait(timeout=1)
                continue
            store._begin_reading(block)
        store._load(block)
        del store, block
