"""Block placement policy: blocks in memory, blocks to write, blocks to read next. No locks, no I/O.

# Note: [Blocks to write]
Backward needs the newest blocks first. So of a step whose blocks come to T bytes the first T - budget are
written, and the rest never is. T is known from the step before; in the first step blocks are written when
memory runs over.

# Note: [Memory bound]
Blocks that stay in memory never take more than the budget. Those that wait for the writer, and those that
were read, may exceed the budget by no more than the largest block: adding another one waits. So a thread
waits only while a block is written or read, and every wait ends.

Every method takes amortised constant time in the number of blocks.
"""

from bisect import bisect_left, insort
from collections import OrderedDict

import torch

from trocar_server.spool.files.entries import Block, EntryState

_NEW_STEP_SHARE = 4


class Ledger:
    """Accounts for blocks in memory and on disk. Not thread-safe.

    Args:
        budget_bytes: The most bytes of blocks that stay in memory.
        ahead_bytes: The most prefetched bytes, except for a single block larger than that.

    Attributes:
        held_bytes: Of blocks that are in memory since they were saved.
        pending_bytes: Of those, bytes queued for writing or being written.
        loaded_bytes: Of blocks that are in memory because they were read, or are being read.
        peak_bytes: The most that both came to.
        is_backward: Whether blocks were requested since the last one was saved.
        budget_bytes: As given.
        live_bytes: Of all blocks with references, wherever they are.
        staying: Blocks in memory that are not to be written, oldest first.
        stored: Blocks on disk only, by number.
    """

    def __init__(self, budget_bytes: int, ahead_bytes: int) -> None:
        self.held_bytes = self.pending_bytes = self.loaded_bytes = self.peak_bytes = 0
        self.is_backward = False
        self.budget_bytes, self._ahead = budget_bytes, ahead_bytes
        self.staying: OrderedDict[int, Block] = OrderedDict()  # oldest first, as all of these
        self._queue: OrderedDict[int, Block] = OrderedDict()
        self._loaded: OrderedDict[int, Block] = OrderedDict()  # in the order of reading
        self.stored: dict[int, Block] = {}
        self._numbers: list[int] = []  # of stored blocks, sorted; some are gone
        self.live_bytes = self._step_bytes = self._last_step_bytes = 0
        self._largest = 0
        self._cursor = 0  # the block that was requested last
        self._top = 0  # the newest block that the present backward pass requested
        self._top_read = 0  # and the newest that was read
        self._pass_number = 0
        self._read_below = 0  # those above it were prefetched, or skipped

    @property
    def memory_bytes(self) -> int:
        """Bytes of blocks in memory."""
        return self.held_bytes + self.loaded_bytes

    @property
    def is_empty(self) -> bool:
        """Whether no block has references."""
        return self.live_bytes == 0

    def has_queue(self) -> bool:
        """Whether blocks wait to be written."""
        return bool(self._queue)

    # --- Forward ----------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Note that a forward pass begins; blocks of an earlier one may still exist."""
        self.is_backward = False
        if self.live_bytes * _NEW_STEP_SHARE <= self._step_bytes and self._step_bytes > self.live_bytes:
            self._last_step_bytes, self._step_bytes = self._step_bytes, self.live_bytes
        if not self.live_bytes:
            self._largest = 0

    def make_room(self, byte_count: int) -> bool:
        """Evict blocks that need not be in memory; returns whether there is room for another block now.

        If there is none, there will be after a block has been written or read.
        """
        self._queue_oldest(byte_count)
        largest = max(self._largest, byte_count)
        self._forget_until(self.budget_bytes - byte_count)
        return self.memory_bytes + byte_count <= self.budget_bytes + largest

    def add(self, block: Block) -> None:
        """Add a new block, which is in memory; see `make_room`."""
        if self.is_empty and self.is_backward:
            self.begin_step()
        self.is_backward = False
        self.staying[block.number] = block
        self.held_bytes += block.byte_count
        self.live_bytes += block.byte_count
        self._step_bytes = max(self._step_bytes, self.live_bytes)
        self._largest = max(self._largest, block.byte_count)
        if self.live_bytes <= self._last_step_bytes - self.budget_bytes:  # see Note: [Blocks to write]
            self._enqueue(block)
        self._queue_oldest(0)
        self._measure()

    def next_to_write(self) -> Block | None:
        """Return the oldest queued block, now being written; None when the queue is empty."""
        if not self._queue:
            return None
        _, block = self._queue.popitem(last=False)
        block.state = EntryState.WRITING
        return block

    def written(self, block: Block) -> None:
        """Record that a block is on disk: its memory is free."""
        self._leave_memory(block, is_pending=True)
        if block.state is EntryState.GONE:
            return
        block.state = EntryState.STORED
        self.stored[block.number] = block
        if not self._numbers or block.number > self._numbers[-1]:
            self._numbers.append(block.number)
        else:
            insort(self._numbers, block.number)
        if len(self._numbers) > 2 * len(self.stored) + 64:
            self._numbers = sorted(self.stored)
        if self.is_backward and block.number < self._cursor:
            self._read_below = max(self._read_below, block.number + 1)

    def not_written(self, block: Block) -> None:
        """Record that writing has failed: queued blocks stay in memory for now."""
        while self._queue:
            self._stay(self._queue.popitem()[1])
        if block.state is EntryState.GONE:
            self._leave_memory(block, is_pending=True)
        else:
            self._stay(block)

    # --- Backward ---------------------------------------------------------------------------------

    def ask(self, block: Block) -> None:
        """Note that a block is needed.

        When backward begins, queued blocks are used from memory.
        """
        if not self.is_backward:
            self.is_backward = True
            self._top = 0
            self._take_back_queue()
        is_above = block.number > self._cursor
        self._cursor = block.number
        if block.number > self._top or (
            is_above and block.number >= self._top_read and block.state is EntryState.STORED
        ):
            self._begin_pass()
        elif block.state is EntryState.STORED or block.number < self._read_below:
            self._read_below = block.number

    def _begin_pass(self) -> None:
        self._pass_number += 1
        self._top = self._read_below = self._cursor
        self._top_read = 0

    def make_room_to_read(self, block: Block) -> bool:
        """Evict blocks that were read, before another read; returns whether there is room for it now."""
        limit = self.budget_bytes + max(self._largest, block.byte_count) - block.byte_count
        self._queue_oldest(0)  # more than the budget stays after a fault of the disk
        self._forget_used(block.byte_count)
        self._forget_until(limit)
        return self.memory_bytes <= limit

    def next_to_read(self) -> Block | None:
        """Return the block that is needed next, if it is on disk and there is room for it."""
        if not self.is_backward or not self.stored:
            return None
        position = bisect_left(self._numbers, self._read_below)
        while position:
            position -= 1
            block = self.stored.get(self._numbers[position])
            if block is not None and block.state is EntryState.STORED:
                return block if self._has_room_ahead(block.byte_count) else None
            self._read_below = self._numbers[position]
        return None

    def begin_reading(self, block: Block) -> None:
        """Record that a block is being read: it takes memory from now on."""
        block.state, block.pass_number = EntryState.READING, self._pass_number
        self._loaded[block.number] = block
        self.loaded_bytes += block.byte_count
        self._read_below = min(self._read_below, block.number)
        self._top_read = max(self._top_read, block.number)
        self._measure()

    def loaded(self, block: Block, storage: torch.UntypedStorage | None) -> None:
        """Record the result of reading a block: its bytes, or None."""
        if storage is None or block.state is EntryState.GONE:
            self._unload(block)
        if block.state is EntryState.READING:
            block.storage = storage
            block.state = EntryState.STORED if storage is None else EntryState.LOADED

    # --- The end ----------------------------------------------------------------------------------

    def drop(self, block: Block) -> None:
        """Remove a block without references. While it is written or read it still takes memory."""
        if block.state in (EntryState.HELD, EntryState.QUEUED):
            is_pending = self._queue.pop(block.number, None) is not None
            self.staying.pop(block.number, None)
            self._leave_memory(block, is_pending)
        elif block.state is EntryState.LOADED:
            self._unload(block)
            block.storage = None
        self.stored.pop(block.number, None)
        self.live_bytes -= block.byte_count
        block.state = EntryState.GONE

    # --- Within -----------------------------------------------------------------------------------

    def _measure(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.memory_bytes)

    def _enqueue(self, block: Block) -> None:
        del self.staying[block.number]
        self._queue[block.number] = block
        self.pending_bytes += block.byte_count
        block.state = EntryState.QUEUED

    def _stay(self, block: Block) -> None:
        block.state = EntryState.HELD
        self.pending_bytes -= block.byte_count
        self.staying[block.number] = block
        self.staying.move_to_end(block.number, last=False)

    def _leave_memory(self, block: Block, is_pending: bool) -> None:
        block.storage = None
        self.held_bytes -= block.byte_count
        if is_pending:
            self.pending_bytes -= block.byte_count

    def _queue_oldest(self, byte_count: int) -> None:
        """Queue blocks until the rest and a new one fit."""
        excess = self.held_bytes - self.pending_bytes + byte_count - self.budget_bytes
        while excess > 0 and self.staying:
            block = next(iter(self.staying.values()))
            excess -= block.byte_count
            self._enqueue(block)

    def _take_back_queue(self) -> None:
        room = self.budget_bytes - (self.held_bytes - self.pending_bytes)
        while self._queue:
            number, block = next(reversed(self._queue.items()))
            room -= block.byte_count
            if room < 0:
                return
            del self._queue[number]
            self._stay(block)

    def _has_room_ahead(self, byte_count: int) -> bool:
        self._forget_used(byte_count)
        room = self.budget_bytes - self.held_bytes - self.loaded_bytes
        is_within = self.loaded_bytes + byte_count <= self._ahead or not self.loaded_bytes
        return byte_count <= room and is_within

    def _forget_used(self, byte_count: int) -> None:
        """Evict blocks that this pass has used or an earlier one left, until the window has room."""
        while self._loaded and self.loaded_bytes + byte_count > self._ahead:
            block = next(iter(self._loaded.values()))
            is_needed = block.number <= self._cursor and block.pass_number == self._pass_number
            if is_needed or block.state is not EntryState.LOADED:
                return
            self._forget(block)

    def _forget_until(self, most_bytes: int) -> None:
        """Evict blocks that were read, in order of reading, while blocks in memory take more than that."""
        if self.memory_bytes <= most_bytes or not self._loaded:
            return
        for block in list(self._loaded.values()):
            if block.state is EntryState.LOADED:
                self._forget(block)
            if self.memory_bytes <= most_bytes:
                return

    def _forget(self, block: Block) -> None:
        self._unload(block)
        block.state, block.storage = EntryState.STORED, None

    def _unload(self, block: Block) -> None:
        del self._loaded[block.number]
        self.loaded_bytes -= block.byte_count
