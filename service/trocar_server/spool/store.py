"""Blocks in memory and on disk, within a budget: one writer and one reader thread.

All state is under one lock. Packing threads add blocks, and wait while memory is over the budget; the writer
takes the oldest. Unpacking threads ask for blocks, newest first, and the reader brings what comes next.

# Note: [What cannot stay]
Backward needs the newest blocks first. So of a step whose blocks come to T bytes the first T - budget are
written, and the rest never is. T is known from the step before; in the first step blocks are written when
memory runs over.
"""

import os
import threading
import time
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from trocar_server.spool.directory import remove_leftovers
from trocar_server.spool.encoding import Encoding, Kind
from trocar_server.spool.entries import IN_MEMORY, Block, State
from trocar_server.spool.errors import SpoolError, SpoolFullError, read_error, write_error
from trocar_server.spool.header import Item
from trocar_server.spool.memory import BufferPool, padded, storage_bytes
from trocar_server.spool.options import DiskOptions
from trocar_server.spool.pool import ChunkPool
from trocar_server.spool.report import Report
from trocar_server.spool.transfer import Place, Transfer, phase_of

_REST_S = 1.0
_STORES: "weakref.WeakSet[BlockStore]" = weakref.WeakSet()


class BlockStore:
    """Keeps blocks within a budget; see the module.

    Args:
        parent: Where the process's own folder is made.
        budget_bytes: The most bytes of blocks in memory, but for the largest one.
        ahead_bytes: The most bytes that are read ahead.
        options: How blocks are kept on disk.
    """

    def __init__(self, parent: Path, budget_bytes: int, ahead_bytes: int, options: DiskOptions) -> None:
        self.report = Report(notes=options.notes())
        self._parent = parent
        self._budget = budget_bytes
        self._ahead = ahead_bytes
        self._options = options
        self._number = self._generation = 0
        self._is_closed = False
        remove_leftovers(parent)
        self._reset()
        _STORES.add(self)

    def _reset(self) -> None:
        self._lock = threading.Condition(threading.RLock())
        self.packing = threading.Lock()
        self._pool = ChunkPool(self._parent, self._options.quota_bytes, self.report.note)
        self._buffers = BufferPool(self._ahead)
        self._held: dict[int, Block] = {}  # in memory, by number: oldest first
        self._queue: deque[Block] = deque()
        self._stored: list[Block] = []  # by number
        self._loaded: dict[int, Block] = {}
        self._released: deque[Block] = deque()  # from __del__, which must take no lock
        self._held_bytes = self._loaded_bytes = 0
        self._largest = 0
        self._cursor = 0
        self._step_bytes = self._last_step_bytes = 0
        self._is_backward = False
        self._error: SpoolError | None = None
        self._failed: Block | None = None
        self._threads: list[threading.Thread] = []

    def _begin_anew(self) -> None:
        """In a forked process: leave the files, the threads and the locks to the parent.

        Blocks of before can still be used here if they are in memory.
        """
        self._pool.forget()
        for block in self._loaded.values():
            if block.state is State.READING:
                block.state = State.STORED
        self._generation += 1
        self._reset()

    def begin_step(self) -> None:
        """Note that a forward pass begins."""
        with self._lock:
            self._collect()
            self._is_backward = False
            self._buffers.clear()
            if self._failed is not None and self._failed.state is State.GONE:
                self._error = self._failed = None  # its graph was dropped before it could come out
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
            self._number += 1
            block.number, block.users, block.generation = self._number, 1, self._generation
            self._held[block.number] = block
            self._held_bytes += block.byte_count
            self._largest = max(self._largest, block.byte_count)
            self.report.unique_bytes += block.byte_count
            self._step_bytes += block.byte_count
            self._is_backward = False
            try:
                self._raise_error()
                if self._step_bytes <= self._last_step_bytes - self._budget:  # see Note: [What cannot stay]
                    self._enqueue(block)
                self._make_room()
                self._measure()
                self._wait(lambda: self._has_room_for(block) or self._error is not None or self._is_closed)
                self._raise_error()
            except BaseException:
                self.release(block)
                self._collect()
                raise

    def _has_room_for(self, block: Block) -> bool:
        return self._held_bytes <= self._budget + block.byte_count or not self._queue_is_busy()

    def adopt(self, block: Block) -> bool:
        """Take another user of a block; False when it is gone."""
        with self._lock:
            self._collect()
            if block.state is State.GONE or block.generation != self._generation:
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
            self._raise_error()
            while block.storage is None:
                if block.error is not None:
                    error, block.error = block.error, None
                    try:
                        raise error
                    finally:
                        del error  # as in _raise_error
                if block.state is State.READING:
                    self._wait(lambda: block.state is not State.READING)
                else:
                    self._read_now(block)
            self._lock.notify_all()  # the reader may go on behind it
            return block.storage, block.start

    def release(self, block: Block) -> None:
        """Say that a user of a block is gone. Takes no lock: it may be called by the garbage collector."""
        self._released.append(block)

    def rest(self) -> None:
        """Say that nothing has happened for a while."""
        with self._lock:
            self._collect()
            if not self._loaded:
                self._buffers.clear()
        try:
            self._pool.rest(time.monotonic())
        except OSError as error:
            self.report.note(str(write_error(error)))

    def snapshot(self) -> Report:
        """Return what has been done so far."""
        with self._lock:
            self._collect()
            return replace(
                self.report,
                file_count=self._pool.peak_files,
                disk_peak_bytes=self._pool.peak_bytes,
                notes=list(self.report.notes),
            )

    def close(self) -> None:
        """Stop the threads and remove the files."""
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=10)
        self._pool.close()

    # --- under the lock ---------------------------------------------------------------------------

    def _collect(self) -> None:
        """Take away blocks that nobody needs any more."""
        while self._released:
            block = self._released.popleft()
            block.users -= 1
            if block.users == 0 and block.generation == self._generation:
                self._drop(block)

    def _drop(self, block: Block) -> None:
        if block.state in IN_MEMORY:
            self._held.pop(block.number, None)
            self._held_bytes -= block.byte_count
        if block.state in (State.LOADED, State.READING):
            self._unload(block)
        was_writing = block.state is State.WRITING
        block.state, block.storage = State.GONE, block.storage if was_writing else None
        self._leave_disk(block)
        self._lock.notify_all()

    def _leave_disk(self, block: Block) -> None:
        place, block.place = block.place, None
        if place is not None:
            self._pool.leave(place.chunk)

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
        self._lock.wait_for(is_ready)
        self.report.stall_count += 1
        self.report.stall_s += time.perf_counter() - started

    def _raise_error(self) -> None:
        if self._error is not None:
            error, self._error, self._failed = self._error, None, None
            try:
                raise error
            finally:
                del error  # or this frame, the error and all tensors of the caller hold each other

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
            self._load(block, Transfer())
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
            if block.error is not None:
                return None
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

    def _write(self, block: Block, transfer: Transfer) -> None:
        storage = block.storage
        assert storage is not None
        try:
            source = storage_bytes(storage, block.byte_count)
            encoding = self._options.encoding.choose(source, block.dtype)
            place = self._placed(block, source, storage.data_ptr(), encoding, transfer)
        except BaseException as error:  # noqa: BLE001 - it comes out of forward or backward
            with self._lock:
                self._not_written(block, write_error(error))
        else:
            with self._lock:
                block.place = place
                self._written(block)

    def _placed(
        self, block: Block, source: memoryview, address: int, encoding: Encoding, transfer: Transfer
    ) -> Place:
        size = encoding.stored_bytes(block.byte_count)
        item = Item(f"{block.number}", encoding.stored_dtype, 0, size, encoding.remark)
        chunk, offset = self._pool.place(item, phase_of(address, encoding))
        try:
            try:
                return transfer.write(chunk, offset, source, address, encoding)
            except OSError as error:
                if not isinstance(write_error(error), SpoolFullError) or not self._pool.drop_free():
                    raise
            return transfer.write(chunk, offset, source, address, encoding)  # in the room of free files
        except BaseException:
            self._pool.leave(chunk)
            raise

    def _written(self, block: Block) -> None:
        assert block.place is not None
        self.report.written_bytes += padded(block.place.byte_count)
        self._count_encoded(block.place.encoding, block.byte_count)
        block.storage = None
        if block.state is State.GONE:
            self._leave_disk(block)
        else:
            self._held.pop(block.number, None)
            self._held_bytes -= block.byte_count
            block.state = State.STORED
            index = bisect_left(self._stored, block.number, key=lambda stored: stored.number)
            self._stored.insert(index, block)
            if len(self._stored) > 2 * (sum(b.state is not State.GONE for b in self._stored) + 64):
                self._stored = [stored for stored in self._stored if stored.state is not State.GONE]
        self._lock.notify_all()

    def _count_encoded(self, encoding: Encoding, byte_count: int) -> None:
        if encoding.is_lossy:
            self.report.lossy_bytes += byte_count
        elif encoding.kind is Kind.BITS:
            self.report.packed_bytes += byte_count

    def _not_written(self, block: Block, error: SpoolError) -> None:
        """After a fault: everything that waits stays in memory, and the files go with their graphs."""
        if block.state is State.WRITING:
            block.state = State.HELD
        elif block.state is State.GONE:
            block.storage = None
        for queued in self._queue:
            if queued.state is State.QUEUED:
                queued.state = State.HELD
        self._queue.clear()
        self._pool.condemn()
        self._error, self._failed = error, block
        self.report.note(str(error))
        self._lock.notify_all()

    def _load(self, block: Block, transfer: Transfer) -> None:
        """Read a block that is in state READING."""
        error: BaseException | None = None
        storage, start, place = None, 0, block.place
        try:
            if place is not None:
                storage, start = transfer.read(place, block.byte_count, self._buffers)
        except Exception as raised:  # noqa: BLE001 - it comes out of backward
            error = read_error(raised)
        except BaseException as raised:  # noqa: BLE001 - an interrupt comes out as it is
            error = raised
        with self._lock:
            if block.state is State.READING and place is not None:
                self._loaded_now(block, storage, start, error)
            self._lock.notify_all()

    def _loaded_now(
        self, block: Block, storage: torch.UntypedStorage | None, start: int, error: BaseException | None
    ) -> None:
        place = block.place
        assert place is not None
        self.report.read_bytes += padded(place.byte_count)
        block.storage, block.start, block.error = storage, start, error
        block.state = State.LOADED if error is None else State.STORED
        if error is not None:
            self._unload(block)
            self._pool.condemn(place.chunk)
            self.report.note(str(error))


def _write_forever(me: "weakref.ref[BlockStore]", lock: threading.Condition) -> None:
    transfer: Transfer | None = None
    while True:
        is_idle = False
        with lock:
            store = me()
            if store is None or store._is_closed:
                return
            block = store._next_to_write()
            if block is None:
                del store
                is_idle = not lock.wait(timeout=_REST_S)
                store = me()
            else:
                block.state = State.WRITING
        if store is not None and block is not None:
            transfer = transfer or Transfer(store._options.checksum)
            store._write(block, transfer)
        elif store is not None and is_idle:
            store.rest()
        del store, block


def _read_forever(me: "weakref.ref[BlockStore]", lock: threading.Condition) -> None:
    transfer: Transfer | None = None
    while True:
        with lock:
            store = me()
            if store is None or store._is_closed:
                return
            store._collect()
            block = store._next_to_read()
            if block is None:
                del store
                lock.wait(timeout=_REST_S)
                continue
            store._begin_reading(block)
        transfer = transfer or Transfer()
        store._load(block, transfer)
        del store, block


def _begin_anew_in_fork() -> None:
    for store in list(_STORES):
        store._begin_anew()


os.register_at_fork(after_in_child=_begin_anew_in_fork)
