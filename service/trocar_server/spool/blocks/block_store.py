"""Block store: blocks in memory and on disk, thread-safe, with a writer and a reader thread.

Saving threads wait while memory is over the budget; the writer takes the oldest blocks. Backward needs the
newest first, and the reader prefetches the next ones. The policy is in `ledger`, the lock in `blocks`, the
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

from trocar_server.spool.blocks.blocks import Blocks
from trocar_server.spool.blocks.ledger import Ledger
from trocar_server.spool.blocks.traffic import Traffic
from trocar_server.spool.files.block_files import Disk
from trocar_server.spool.files.directory import remove_leftovers
from trocar_server.spool.files.entries import Block, EntryState, Label
from trocar_server.spool.files.file_pool import close_pools, forget_pools
from trocar_server.spool.files.options import DiskOptions
from trocar_server.spool.freed_memory import freed_memory
from trocar_server.spool.report import Report
from trocar_server.spool.spool_errors import SpoolError, SpoolReadError

_CHECKED_BYTES = 1 << 20
"""Of blocks whose coming and going may change what the process keeps of freed memory."""

_STORES: "weakref.WeakSet[BlockStore]" = weakref.WeakSet()


class BlockStore:
    """Keeps blocks within a budget; see the module.

    Args:
        parent: Where the process's own folder is made.
        budget_bytes: The most bytes of blocks in memory, but for the largest one.
        ahead_bytes: The most bytes that are read ahead.
        options: Disk options.

    Attributes:
        report: What is counted as it happens.
        ledger: The placement policy.
        blocks: The blocks and their lock.
        disk: Their files.
        traffic: The threads.
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
        self.ledger = Ledger(self._budget, self._ahead)
        self.blocks = Blocks(self.ledger, self.report, self._generation)
        self.disk = Disk(self._parent, self._ahead, self._options, self.report)
        self.traffic = Traffic(self.blocks, self.ledger, self.disk, self.report)
        self._finalizer = weakref.finalize(self, self.disk.abandon)
        self._finalizer.atexit = False  # see _close_at_exit, which waits for the threads

    def begin_step(self) -> None:
        """Note that a forward pass begins."""
        with self.blocks:
            self.blocks.collect()
            self.ledger.begin_step()
            self.report.step_count += 1
        self.traffic.leave_files()
        self.disk.buffers.clear()
        limit = freed_memory()
        if limit is not None:
            limit.begin_step()

    def find(self, key: Hashable) -> Block | None:
        """Return the block of a key, with one more reference, or None."""
        with self.blocks:
            return self.blocks.find(key)

    def save(
        self,
        key: Hashable,
        origin: torch.UntypedStorage,
        byte_count: int,
        dtype: torch.dtype,
        copy: Callable[[], torch.UntypedStorage] | None = None,
        ready: Callable[[], None] | None = None,
        label: Label | None = None,
    ) -> Block:
        """Add a block, or a reference to an existing one; waits while memory is over the budget.

        Args:
            key: The block's place in its origin, with the version.
            origin: The storage that is saved.
            byte_count: Of the block.
            dtype: Of its elements.
            copy: Makes the block; None where it is all of the origin.
            ready: Waits until the block has its bytes; None where it has them at once.
            label: Description for readers of its file.

        Raises:
            SpoolError: The writer has failed since, or the spool is closed.
        """
        _check_freed_memory(byte_count)
        with self.blocks:
            self.blocks.collect()
            known = self.blocks.find(key)
            while known is None and not self._has_room(byte_count):
                self.blocks.wait()
                known = self.blocks.find(key)
            if known is not None:
                return known
            if self.ledger.is_empty:
                self.disk.pool.forgive()
            self._number += 1
            storage = origin if copy is None else copy()
            block = Block(self._number, byte_count, dtype, key, StorageWeakRef(origin), storage)
            block.generation, block.ready = self._generation, ready
            block.label, block.step = label or block.label, self.report.step_count
            self.blocks.add(block)
            self.report.unique_bytes += byte_count
            self.traffic.poke_writer()
            return block

    def get(self, block: Block) -> torch.UntypedStorage:
        """Return the bytes of a block, from memory or from disk.

        Raises:
            SpoolError: They cannot be read back, or the writer has failed since.
        """
        if block.generation != self._generation:
            return _of_parent(block)
        _check_freed_memory(block.byte_count)
        with self.blocks:
            self.blocks.collect()
            self.ledger.ask(block)
            self.blocks.raise_failure()
            while (storage := block.storage) is None:
                self._bring(block)
            # May evict the block again, if another thread requested an older one.
            self.traffic.poke_reader()
            return storage

    def peek(self, block: Block) -> torch.UntypedStorage | None:
        """Return the bytes of a block that is needed soon, if in memory; otherwise start reading them."""
        with self.blocks:
            self.blocks.collect()
            if block.generation == self._generation and block.state is not EntryState.GONE:
                self.ledger.ask(block)
                self.traffic.poke_reader()
            return block.storage

    def release(self, block: Block) -> None:
        """Drop one reference to a block. Waits for no lock."""
        self.blocks.release(block)

    def snapshot(self) -> Report:
        """Return the report so far."""
        with self.blocks:
            self.blocks.collect()
        self.traffic.leave_files()
        with self.blocks:
            return replace(
                self.report,
                peak_bytes=self.ledger.peak_bytes,
                file_count=self.disk.pool.peak_files,
                disk_peak_bytes=self.disk.pool.peak_bytes,
                notes=list(self.report.notes),
            )

    def close(self) -> None:
        """Stop the threads and remove the files."""
        self.traffic.end()
        self.disk.close()

    # --- Under the lock ---------------------------------------------------------------------------

    def _has_room(self, byte_count: int) -> bool:
        if self.blocks.is_closed:
            raise SpoolError("the spool is closed: nothing more can be saved")
        self.blocks.raise_failure()
        has_room = self.ledger.make_room(byte_count)
        self.traffic.poke_writer()
        return has_room

    def _bring(self, block: Block) -> None:
        """Read a block, or wait until another thread has, or until there is room."""
        if self.blocks.is_closed:
            raise SpoolReadError("the spool was closed: saved tensors that were on disk are lost")
        self.blocks.raise_failure()
        has_room = self.ledger.make_room_to_read(block)
        self.traffic.poke_writer()
        if block.state is EntryState.READING or not has_room:
            self.blocks.wait()
        else:
            self.traffic.read_now(block)

    # --- Forks and the end ------------------------------------------------------------------------

    def _begin_anew(self) -> None:
        """In a forked process: leave the files, the threads and the locks to the parent.

        Blocks of the parent can still be used here if they are in memory.
        """
        self.disk.forget()
        self._finalizer.detach()
        self._generation += 1
        self._reset()


def _check_freed_memory(byte_count: int) -> None:
    limit = freed_memory() if byte_count >= _CHECKED_BYTES else None
    if limit is not None:
        limit.check()


def _of_parent(block: Block) -> torch.UntypedStorage:
    if block.storage is None:
        raise SpoolReadError("tensors saved on disk belong to the parent process of this fork")
    return block.storage


def _begin_anew_in_fork() -> None:
    for store in list(_STORES):
        store._begin_anew()
    forget_pools()


def _close_at_exit() -> None:
    for store in list(_STORES):
        store.close()
    close_pools()  # of dropped spools, too


os.register_at_fork(after_in_child=_begin_anew_in_fork)
atexit.register(_close_at_exit)
