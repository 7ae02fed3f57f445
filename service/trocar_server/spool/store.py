"""Blocks in memory and on disk, for many threads: those that save and ask, a writer and a reader.

All state is under one lock. Saving threads wait while memory is over the budget; the writer takes the oldest
blocks. Asking threads want the newest first, and the reader brings what comes next. The rules are in
`ledger`.

# Note: [The garbage collector may come at any time]
The last reference to a saved tensor may go anywhere: in another thread, or while this thread holds the lock,
because any allocation may start the garbage collector. So `release` waits for no lock. What it leaves behind
is done by whoever holds the lock, when it is given back; and files, which have a lock of their own, are left
to the writer thread.
"""

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from trocar_server.spool.directory import remove_leftovers
from trocar_server.spool.disk import Disk
from trocar_server.spool.encoding import Encoding, Kind
from trocar_server.spool.entries import Block, State
from trocar_server.spool.errors import SpoolError, SpoolReadError, write_error
from trocar_server.spool.ledger import Ledger
from trocar_server.spool.memory import padded
from trocar_server.spool.options import DiskOptions
from trocar_server.spool.report import Report
from trocar_server.spool.transfer import Place, Transfer
from trocar_server.spool.worker import Worker

_REST_S = 1.0
_CLOSE_S = 10.0
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
        self._parent, self._options = parent, options
        self._budget, self._ahead = budget_bytes, ahead_bytes
        self._number = self._generation = 0
        self._is_closed = False
        remove_leftovers(parent)
        self._reset()
        _STORES.add(self)

    def _reset(self) -> None:
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)
        self._waiting_count = 0
        self._ledger = Ledger(self._budget, self._ahead)
        self._known: dict[Hashable, Block] = {}
        self._released: deque[Block] = deque()  # see Note: [The garbage collector may come at any time]
        self._left: deque[Place] = deque()
        self._leaving = threading.Lock()
        self._error: SpoolError | None = None
        self._failed: Block | None = None
        self._disk = Disk(self._parent, self._ahead, self._options, self.report)
        self._writer: Worker[BlockStore] | None = None
        self._reader: Worker[BlockStore] | None = None
        self._finalizer = weakref.finalize(self, self._disk.close)
        self._finalizer.atexit = False  # see _close_at_exit, which waits for the threads

    def __enter__(self) -> None:
        """Take the lock."""
        self._mutex.acquire()

    def __exit__(self, *_: object) -> None:
        """Give the lock back, and collect what was released meanwhile."""
        self._mutex.release()
        if self._released:
            self._drain()

    # --- For the threads of the user --------------------------------------------------------------

    def begin_step(self) -> None:
        """Note that a forward pass begins."""
        with self:
            self._collect()
            self._ledger.begin_step()
            self.report.step_count += 1
        self._leave_files()
        self._disk.buffers.clear()

    def find(self, key: Hashable) -> Block | None:
        """Return a block that is known by a key, with one more user, or None."""
        with self:
            return self._found(key)

    def save(
        self,
        key: Hashable,
        origin: torch.UntypedStorage,
        byte_count: int,
        dtype: torch.dtype,
        copy: Callable[[], torch.UntypedStorage] | None = None,
    ) -> Block:
        """Take a block, or another user of one that is known; waits while memory is over the budget.

        Args:
            key: Where the block lies in its origin, at which version.
            origin: The storage that is saved.
            byte_count: Of the block.
            dtype: What its elements are.
            copy: Makes the block; None where it is all of the origin.

        Raises:
            SpoolError: The writer has failed since, or the spool is closed.
        """
        with self:
            self._collect()
            known = self._found(key)
            while known is None:
                if self._is_closed:
                    raise SpoolError("the spool is closed: nothing more can be saved")
                self._raise_failure()
                has_room = self._ledger.make_room(byte_count)
                self._poke_writer()
                if has_room:
                    break
                self._wait()
                known = self._found(key)
            if known is not None:
                return known
            if self._ledger.is_empty:
                self._disk.pool.forgive()
            self._number += 1
            storage = origin if copy is None else copy()
            block = Block(self._number, byte_count, dtype, key, StorageWeakRef(origin), storage)
            block.generation = self._generation
            self._known[key] = block
            self._ledger.add(block)
            self.report.unique_bytes += byte_count
            self._poke_writer()
            return block

    def get(self, block: Block) -> torch.UntypedStorage:
        """Return the bytes of a block, from memory or from disk.

        Raises:
            SpoolError: They cannot be brought back, or the writer has failed since.
        """
        if block.generation != self._generation:
            return _of_parent(block)
        with self:
            self._collect()
            self._ledger.ask(block)
            self._raise_failure()
            while (storage := block.storage) is None:
                if self._is_closed:
                    raise SpoolReadError("the spool was closed: saved tensors that were on disk are lost")
                self._raise_failure()
                has_room = self._ledger.make_room_to_read(block)
                self._poke_writer()
                if block.state is State.READING or not has_room:
                    self._wait()
                else:
                    self._read_now(block)
            self._poke_reader()  # may forget the block again, if another thread asked for an older one
            return storage

    def release(self, block: Block) -> None:
        """Say that a user of a block is gone. Waits for no lock."""
        self._released.append(block)
        self._drain()

    def snapshot(self) -> Report:
        """Return what has been done so far."""
        with self:
            self._collect()
        self._leave_files()
        with self:
            return replace(
                self.report,
                peak_bytes=self._ledger.peak_bytes,
                file_count=self._disk.pool.peak_files,
                disk_peak_bytes=self._disk.pool.peak_bytes,
                notes=list(self.report.notes),
            )

    def close(self) -> None:
        """Stop the threads and remove the files."""
        with self:
            self._is_closed = True
            self._changed.notify_all()
            workers = [worker for worker in (self._writer, self._reader) if worker is not None]
        for worker in workers:
            worker.stop()
        for worker in workers:
            worker.join(_CLOSE_S)
        self._disk.close()

    # --- Under the lock ---------------------------------------------------------------------------

    def _found(self, key: Hashable) -> Block | None:
        block = self._known.get(key)
        if block is not None:
            block.users += 1
        return block

    def _collect(self) -> None:
        """Take away blocks that nobody needs any more."""
        dropped = False
        while self._released:
            block = self._released.popleft()
            block.users -= 1
            if block.users == 0 and block.generation == self._generation:
                self._drop(block)
                dropped = True
        if dropped:
            self._notify()

    def _drop(self, block: Block) -> None:
        if self._known.get(block.key) is block:
            del self._known[block.key]
        self._ledger.drop(block)
        place, block.place = block.place, None
        if place is not None:
            self._left.append(place)
            if self._writer is not None:
                self._writer.poke()

    def _drain(self) -> None:
        """Collect, unless somebody holds the lock: then that one does it."""
        while self._released and self._mutex.acquire(blocking=False):
            try:
                self._collect()
                self._poke_reader()
            finally:
                self._mutex.release()

    def _notify(self) -> None:
        if self._waiting_count:
            self._changed.notify_all()

    def _wait(self) -> None:
        """Wait until a block was written, read or dropped."""
        started = time.perf_counter()
        self._waiting_count += 1
        try:
            self._changed.wait()
        finally:
            self._waiting_count -= 1
            self.report.stall_count += 1
            self.report.stall_s += time.perf_counter() - started
        self._collect()

    def _raise_failure(self) -> None:
        """Raise what stopped the writer, unless the graph is gone for which it wrote."""
        if self._error is None:
            return
        error, failed, self._error, self._failed = self._error, self._failed, None, None
        try:
            if failed is None or failed.state is not State.GONE:
                raise error
        finally:
            del error  # or this frame, the error and the tensors of all callers hold each other

    def _poke_writer(self) -> None:
        if self._ledger.has_queue():
            if self._writer is None:
                self._writer = Worker(self, BlockStore._write_all, "spool-writer", _REST_S)
                self._reader = Worker(self, BlockStore._read_ahead, "spool-reader")
            self._writer.poke()

    def _poke_reader(self) -> None:
        if self._reader is not None and self._ledger.next_to_read() is not None:
            self._reader.poke()

    def _read_now(self, block: Block) -> None:
        """Read a block that nobody has begun to read, in this thread, without the lock meanwhile."""
        self._ledger.begin_reading(block)
        started = time.perf_counter()
        self._mutex.release()
        try:
            error = self._read(block, self._disk.transfer())
        finally:
            self._mutex.acquire()
        self.report.stall_count += 1
        self.report.stall_s += time.perf_counter() - started
        try:
            if error is not None:
                raise error
        finally:
            del error  # as in _raise_failure

    # --- On the threads ---------------------------------------------------------------------------

    def _write_all(self, is_idle: bool) -> None:
        transfer: Transfer | None = None
        while True:
            self._leave_files()
            with self:
                block = None if self._is_closed else self._ledger.next_to_write()
            if block is None:
                break
            transfer = transfer or self._disk.transfer()
            self._write(block, transfer)
        if is_idle:
            self._rest()

    def _write(self, block: Block, transfer: Transfer) -> None:
        try:
            place = self._disk.write(block, transfer)
        except BaseException as error:  # noqa: BLE001 - it comes out of forward or backward
            with self:
                self._not_written(block, write_error(error))
            return
        with self:
            self._count_written(place, block.byte_count)
            self._ledger.written(block)
            if block.state is State.GONE:
                self._left.append(place)
            else:
                block.place = place
            self._notify()
            self._poke_reader()

    def _count_written(self, place: Place, byte_count: int) -> None:
        self.report.written_bytes += padded(place.byte_count)
        encoding: Encoding = place.encoding
        if encoding.is_lossy:
            self.report.lossy_bytes += byte_count
        elif encoding.kind is Kind.BITS:
            self.report.packed_bytes += byte_count

    def _not_written(self, block: Block, error: SpoolError) -> None:
        """After a fault: everything that waits stays in memory, and the files go with their graphs."""
        self._ledger.not_written(block)
        self._disk.pool.condemn()
        self._error, self._failed = error.with_traceback(None), block  # the traceback holds the tensor
        self.report.note(str(error))
        self._notify()

    def _read_ahead(self, _: bool) -> None:
        transfer: Transfer | None = None
        while True:
            with self:
                self._collect()
                block = None if self._is_closed else self._ledger.next_to_read()
                if block is None:
                    return
                self._ledger.begin_reading(block)
            transfer = transfer or self._disk.transfer()
            self._read(block, transfer)  # who needs it tries again, and gets the error
            del block

    def _read(self, block: Block, transfer: Transfer) -> SpoolError | None:
        """Read a block in state READING; returns what went wrong."""
        storage: torch.UntypedStorage | None = None
        error: SpoolError | None = None
        try:
            storage = self._disk.read(block, transfer)
        except SpoolError as raised:
            error = raised.with_traceback(None)  # which holds this frame
        finally:  # an interrupt comes out as it is
            with self:
                self.report.read_bytes += padded(block.byte_count) if storage is not None else 0
                self._ledger.loaded(block, storage)
                if error is not None and block.state is not State.GONE:
                    self.report.note(str(error))
                self._notify()
        return error

    def _rest(self) -> None:
        """Nothing was to be done for a while."""
        with self:
            self._collect()
            has_loaded = self._ledger.loaded_bytes > 0
        if not has_loaded:
            self._disk.buffers.clear()
        try:
            self._disk.pool.rest(time.monotonic())
        except OSError as error:
            self.report.note(str(write_error(error)))

    def _leave_files(self) -> None:
        """Give back the room of blocks that are gone."""
        with self._leaving:  # when it is done, what was left before is given back, by whichever thread
            while self._left:
                self._disk.pool.leave(self._left.popleft().chunk)

    # --- Forks and the end ------------------------------------------------------------------------

    def _begin_anew(self) -> None:
        """In a forked process: leave the files, the threads and the locks to the parent.

        Blocks of before can still be used here if they are in memory.
        """
        self._disk.forget()
        self._finalizer.detach()
        self._generation += 1
        self._reset()


def _of_parent(block: Block) -> torch.UntypedStorage:
    if block.storage is None:
        raise SpoolReadError(
            "what was saved on disk belongs to another process, which was forked to make this one"
        )
    return block.storage


def _begin_anew_in_fork() -> None:
    for store in list(_STORES):
        store._begin_anew()


def _close_at_exit() -> None:
    for store in list(_STORES):
        store.close()


os.register_at_fork(after_in_child=_begin_anew_in_fork)
atexit.register(_close_at_exit)
