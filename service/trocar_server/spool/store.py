"""Blocks in memory and on disk, for many threads: those that save and ask, a writer and a reader.

Saving threads wait while memory is over the budget; the writer takes the oldest blocks. Asking threads want
the newest first, and the reader brings what comes next. The rules are in `ledger`, the lock in `blocks`, the
threads in `traffic`.
"""

import atexit
import os
import weakref
from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from trocar_server.spool.blocks import Blocks
from trocar_server.spool.directory import remove_leftovers
from trocar_server.spool.disk import Disk
from trocar_server.spool.entries import Block, State
from trocar_server.spool.errors import SpoolError, SpoolReadError
from trocar_server.spool.ledger import Ledger
from trocar_server.spool.options import DiskOptions
from trocar_server.spool.report import Report
from trocar_server.spool.traffic import Traffic

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
        remove_leftovers(parent)
        self._reset()
        _STORES.add(self)

    def _reset(self) -> None:
        self._ledger = Ledger(self._budget, self._ahead)
        self._blocks = Blocks(self._ledger, self.report, self._generation)
        self._disk = Disk(self._parent, self._ahead, self._options, self.report)
        self._traffic = Traffic(self._blocks, self._ledger, self._disk, self.report)
        self._finalizer = weakref.finalize(self, self._disk.close)
        self._finalizer.atexit = False  # see _close_at_exit, which waits for the threads

    def begin_step(self) -> None:
        """Note that a forward pass begins."""
        with self._blocks:
            self._blocks.collect()
            self._ledger.begin_step()
            self.report.step_count += 1
        self._traffic.leave_files()
        self._disk.buffers.clear()

    def find(self, key: Hashable) -> Block | None:
        """Return a block that is known by a key, with one more user, or None."""
        with self._blocks:
            return self._blocks.find(key)

    def save(
        self,
        key: Hashable,
        origin: torch.UntypedStorage,
        byte_count: int,
        dtype: torch.dtype,
        copy: Callable[[], torch.UntypedStorage] | None = None,
        ready: Callable[[], None] | None = None,
    ) -> Block:
        """Take a block, or another user of one that is known; waits while memory is over the budget.

        Args:
            key: Where the block lies in its origin, at which version.
            origin: The storage that is saved.
            byte_count: Of the block.
            dtype: What its elements are.
            copy: Makes the block; None where it is all of the origin.
            ready: Waits until the block has its bytes; None where it has them at once.

        Raises:
            SpoolError: The writer has failed since, or the spool is closed.
        """
        with self._blocks:
            self._blocks.collect()
            known = self._blocks.find(key)
            while known is None and not self._has_room(byte_count):
                self._blocks.wait()
                known = self._blocks.find(key)
            if known is not None:
                return known
            if self._ledger.is_empty:
                self._disk.pool.forgive()
            self._number += 1
            storage = origin if copy is None else copy()
            block = Block(self._number, byte_count, dtype, key, StorageWeakRef(origin), storage)
            block.generation, block.ready = self._generation, ready
            self._blocks.add(block)
            self.report.unique_bytes += byte_count
            self._traffic.poke_writer()
            return block

    def get(self, block: Block) -> torch.UntypedStorage:
        """Return the bytes of a block, from memory or from disk.

        Raises:
            SpoolError: They cannot be brought back, or the writer has failed since.
        """
        if block.generation != self._generation:
            return _of_parent(block)
        with self._blocks:
            self._blocks.collect()
            self._ledger.ask(block)
            self._blocks.raise_failure()
            while (storage := block.storage) is None:
                self._bring(block)
            # May forget the block again, if another thread asked for an older one.
            self._traffic.poke_reader()
            return storage

    def peek(self, block: Block) -> torch.UntypedStorage | None:
        """Return the bytes of a block that is needed soon, if they are in memory; else have them read."""
        with self._blocks:
            self._blocks.collect()
            if block.generation == self._generation and block.state is not State.GONE:
                self._ledger.ask(block)
                self._traffic.poke_reader()
            return block.storage

    def release(self, block: Block) -> None:
        """Say that a user of a block is gone. Waits for no lock."""
        self._blocks.release(block)

    def snapshot(self) -> Report:
        """Return what has been done so far."""
        with self._blocks:
            self._blocks.collect()
        self._traffic.leave_files()
        with self._blocks:
            return replace(
                self.report,
                peak_bytes=self._ledger.peak_bytes,
                file_count=self._disk.pool.peak_files,
                disk_peak_bytes=self._disk.pool.peak_bytes,
                notes=list(self.report.notes),
            )

    def close(self) -> None:
        """Stop the threads and remove the files."""
        self._traffic.end()
        self._disk.close()

    # --- Under the lock ---------------------------------------------------------------------------

    def _has_room(self, byte_count: int) -> bool:
        if self._blocks.is_closed:
            raise SpoolError("the spool is closed: nothing more can be saved")
        self._blocks.raise_failure()
        has_room = self._ledger.make_room(byte_count)
        self._traffic.poke_writer()
        return has_room

    def _bring(self, block: Block) -> None:
        """Read a block, or wait until somebody has, or until there is room."""
        if self._blocks.is_closed:
            raise SpoolReadError("the spool was closed: saved tensors that were on disk are lost")
        self._blocks.raise_failure()
        has_room = self._ledger.make_room_to_read(block)
        self._traffic.poke_writer()
        if block.state is State.READING or not has_room:
            self._blocks.wait()
        else:
            self._traffic.read_now(block)

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
