"""Blocks of a device: copied to host memory when they are saved, and back ahead of the backward pass.

In host memory they are blocks as all others, within the same budget, and go to disk by the same rules.

# Note: [What is still on the device]
A copy leaves its source on the device until it is done; so few bytes may be under way at a time. And where
the memory of a block is still alive at its end, because the copy is not done or somebody else has the tensor,
the block is used from there: its version was compared before.
"""

import threading
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable

import torch

from trocar_server.spool.device_copies import Copier, Event
from trocar_server.spool.entries import Block
from trocar_server.spool.store import BlockStore


class Departure:
    """A copy of one block to host memory, which keeps its source alive until it is done."""

    def __init__(
        self, copier: Copier, origin: torch.UntypedStorage, copy: Callable[[], torch.UntypedStorage] | None
    ) -> None:
        self.byte_count = 0
        self._copier, self._copy = copier, copy
        self._source: torch.UntypedStorage | None = origin
        self._event: Event | None = None

    def begin(self) -> torch.UntypedStorage:
        """Begin it; returns the host memory that will have the bytes."""
        assert self._source is not None
        self._source = self._source if self._copy is None else self._copy()
        self.byte_count = self._source.nbytes()
        host, self._event = self._copier.to_host(self._source)
        return host

    def is_over(self) -> bool:
        """Whether it is done."""
        event = self._event
        return event is None or event.query()

    def end(self) -> None:
        """Wait until it is done, and let go of the source."""
        event = self._event
        if event is not None:
            event.synchronize()
        self._source = self._event = self._copy = None


class DeviceTier:
    """Keeps the blocks of one device in a store in host memory. For any thread.

    Args:
        store: Has them in host memory and on disk.
        copier: Copies them.
        window_bytes: The most bytes of the device that are under way to the host, and the most that are back
            ahead of being asked for, but for a single block that is larger.
    """

    def __init__(self, store: BlockStore, copier: Copier, window_bytes: int) -> None:
        self._store, self._copier, self._window = store, copier, window_bytes
        self._mutex = threading.Lock()
        self._released: deque[Block] = deque()
        self._live: dict[int, Block] = {}
        self._users: Counter[int] = Counter()
        self._numbers: list[int] = []  # of live blocks, sorted; some are gone
        self._leaving: deque[Departure] = deque()
        self._leaving_bytes = 0
        self._back: OrderedDict[int, tuple[torch.UntypedStorage, Event]] = OrderedDict()
        self._back_bytes = 0
        self._cursor = 0  # the block that was asked for last

    def __enter__(self) -> None:
        """Take the lock."""
        self._mutex.acquire()
        try:
            self._collect()
        except BaseException:  # the device is failing
            self._mutex.release()
            raise

    def __exit__(self, *_: object) -> None:
        """Give the lock back, and collect what was released meanwhile."""
        self._mutex.release()
        if self._released:
            self._drain()

    def __del__(self) -> None:
        """Copies that nobody needs any more must not read memory that has been given to others."""
        while self._leaving:
            self._leaving.popleft().end()

    # --- As a store -------------------------------------------------------------------------------

    def find(self, key: Hashable) -> Block | None:
        """Return a block that is known by a key, with one more user, or None."""
        block = self._store.find(key)
        if block is not None:
            with self:
                self._add(block)
        return block

    def save(
        self,
        key: Hashable,
        origin: torch.UntypedStorage,
        byte_count: int,
        dtype: torch.dtype,
        copy: Callable[[], torch.UntypedStorage] | None = None,
    ) -> Block:
        """Take a block, see `BlockStore.save`; waits while too many bytes are under way.

        Raises:
            SpoolError: The writer has failed since, or the spool is closed.
        """
        self._settle(byte_count)
        departure = Departure(self._copier, origin, copy)
        block = self._store.save(key, origin, byte_count, dtype, departure.begin, departure.end)
        with self:
            self._add(block)
            self._store.report.offloaded_bytes += departure.byte_count
            if departure.byte_count:
                self._leaving.append(departure)
                self._leaving_bytes += departure.byte_count
        return block

    def get(self, block: Block) -> torch.UntypedStorage:
        """Return the bytes of a block, on the device, for what it does from now on.

        Raises:
            SpoolError: They cannot be brought back from disk, or the writer has failed since.
        """
        with self:
            self._cursor = block.number
            found = self._back.get(block.number)
        alive = _alive(block) if found is None else None
        if alive is None:
            if found is None:
                host = self._store.get(block)
                with self:
                    found = self._bring(block, host)
            self._copier.hand_over(*found)
            alive = found[0]
        self._bring_ahead()
        return alive

    def release(self, block: Block) -> None:
        """Say that a user of a block is gone. Waits for no lock."""
        self._released.append(block)
        self._drain()
        self._store.release(block)

    # --- Within -----------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Collect, unless somebody holds the lock: then that one does it."""
        while self._released and self._mutex.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._mutex.release()

    def _settle(self, byte_count: int) -> None:
        """Wait until so many bytes more may leave the device."""
        while True:
            with self:
                if not self._leaving or self._leaving_bytes + byte_count <= self._window:
                    return
                departure = self._leaving.popleft()
                self._leaving_bytes -= departure.byte_count
            departure.end()

    def _bring_ahead(self) -> None:
        """Begin to bring what is needed next, as far as it is in host memory and there is room."""
        while True:
            with self:
                block = self._next()
            host = None if block is None else self._store.peek(block)
            if block is None or host is None:
                return
            with self:
                if block.number in self._live:
                    self._bring(block, host)

    # --- Under the lock ---------------------------------------------------------------------------

    def _add(self, block: Block) -> None:
        self._users[block.number] += 1
        if block.number not in self._live:
            self._live[block.number] = block
            insort(self._numbers, block.number)

    def _collect(self) -> None:
        """Let go of what nobody needs any more, and of what has left the device."""
        while self._leaving and self._leaving[0].is_over():
            departure = self._leaving.popleft()
            self._leaving_bytes -= departure.byte_count
            departure.end()
        while self._released:
            number = self._released.popleft().number
            self._users[number] -= 1
            if not self._users[number]:
                del self._users[number]
                del self._live[number]
                self._forget(number)
        if len(self._numbers) > 2 * len(self._live) + 64:
            self._numbers = sorted(self._live)

    def _next(self) -> Block | None:
        """Return the block that is needed next and is not on the device, if there is room for it."""
        position = bisect_left(self._numbers, self._cursor)
        there_bytes = 0
        while position and there_bytes <= self._window:
            position -= 1
            block = self._live.get(self._numbers[position])
            if block is None:
                continue
            if block.number not in self._back and _alive(block) is None:
                return block if self._has_room(block.byte_count) else None
            there_bytes += block.byte_count
        return None

    def _has_room(self, byte_count: int) -> bool:
        """Let go of what was used until there is room for a block; returns whether there is."""
        used = [number for number in self._back if number > self._cursor]
        while used and self._back_bytes + byte_count > self._window:
            self._forget(used.pop(0))
        return not self._back or self._back_bytes + byte_count <= self._window

    def _bring(self, block: Block, host: torch.UntypedStorage) -> tuple[torch.UntypedStorage, Event]:
        found = self._back.get(block.number)
        if found is None:
            self._has_room(block.byte_count)
            found = self._back[block.number] = self._copier.to_device(host)
            self._back_bytes += block.byte_count
        return found

    def _forget(self, number: int) -> None:
        found = self._back.pop(number, None)
        if found is not None:
            self._back_bytes -= found[0].nbytes()


class Tiers:
    """The tiers of a spool: one for each device.

    Args:
        store: Has all blocks in host memory and on disk.
        window_bytes: See `DeviceTier`.
        copier_of: Gives what copies for a device; None where the store itself takes its tensors, or nobody.
    """

    def __init__(
        self, store: BlockStore, window_bytes: int, copier_of: Callable[[torch.device], Copier | None]
    ) -> None:
        self._store, self._window, self._copier_of = store, window_bytes, copier_of
        self._homes: dict[torch.device, BlockStore | DeviceTier | None] = {}
        self._lock = threading.Lock()

    def home_of(self, device: torch.device) -> BlockStore | DeviceTier | None:
        """Return what takes tensors of a device; None where they stay."""
        if device not in self._homes:
            with self._lock:
                if device not in self._homes:
                    self._homes[device] = self._home(device)
        return self._homes[device]

    def _home(self, device: torch.device) -> BlockStore | DeviceTier | None:
        copier = self._copier_of(device)
        if copier is not None:
            return DeviceTier(self._store, copier, self._window)
        return self._store if device.type == "cpu" else None


def _alive(block: Block) -> torch.UntypedStorage | None:
    """Return the memory that a block was copied from, if it is all of the block and somebody has it still."""
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(block.origin.cdata)
    return storage if storage is not None and storage.nbytes() == block.byte_count else None
