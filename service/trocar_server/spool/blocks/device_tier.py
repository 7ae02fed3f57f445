"""Device tier: blocks copied to host memory when saved, and prefetched before the backward pass needs them.

In host memory they are ordinary blocks, within the same budget, and go to disk by the same policy.

# Note: [Copies in flight]
A copy keeps its source on the device until it completes, so few bytes may be in flight at a time. And where
a block's device memory is still alive, because the copy is not done or another owner has the tensor, the
block is used from there: its version was compared before.
"""

import threading
from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from trocar_server.spool.blocks.block_store import BlockStore
from trocar_server.spool.blocks.device_copies import Copier, Event
from trocar_server.spool.files.entries import Block, Label


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
        """Start the copy; returns the host memory that will have the bytes."""
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
        """Wait until it is done, and release the source."""
        event = self._event
        if event is not None:
            event.synchronize()
        self._source = self._event = self._copy = None


class _Step:
    """Tells which memory of one forward pass stays on the device: the last, which backward needs first.

    How much a step saves is known from the one before, so in the first step none stays.
    """

    def __init__(self, most_bytes: int, before_bytes: int | None = None) -> None:
        self._left = most_bytes
        self._most, self._before = most_bytes, before_bytes
        self._byte_count = 0
        self._known: dict[int, tuple[StorageWeakRef, bool]] = {}
        """Whether it stays, by address, which the reference keeps from being used again."""

    def next(self) -> "_Step":
        """Return the step after this one."""
        return _Step(self._most, self._byte_count)

    def stays(self, storage: torch.UntypedStorage) -> bool:
        """Whether this memory stays, saved for the first time or again."""
        known = self._known.get(storage._cdata)
        if known is not None:
            return known[1]
        byte_count, before = storage.nbytes(), self._before
        is_last = before is not None and self._byte_count >= before - self._most
        is_staying = is_last and byte_count <= self._left
        self._byte_count += byte_count
        self._left -= byte_count * is_staying
        self._known[storage._cdata] = StorageWeakRef(storage), is_staying
        return is_staying


class DeviceTier:
    """Keeps the blocks of one device in a store in host memory. Thread-safe.

    Args:
        store: The store in host memory and on disk.
        copier: Copies the blocks.
        window_bytes: The most bytes in flight to the host, and the most prefetched to the device, except
        for a single block that is larger.
        staying_bytes: The most bytes of a step that stay on the device: its last ones.

    Attributes:
        live: Blocks with references, by number.
        departures: Copies to host memory that are not known to be done.
        departing_bytes: Of their sources.
        on_device: Blocks that are on the device again, by number, in the order in which they were brought.
        on_device_bytes: Of these.
    """

    def __init__(self, store: BlockStore, copier: Copier, window_bytes: int, staying_bytes: int = 0) -> None:
        self._store, self._copier, self._window = store, copier, window_bytes
        self._step = _Step(staying_bytes)
        self._mutex = threading.Lock()
        self._released: deque[Block] = deque()
        self.live: dict[int, Block] = {}
        self._users: Counter[int] = Counter()
        self._numbers: list[int] = []  # of live blocks, sorted; some are gone
        self.departures: deque[Departure] = deque()
        self.departing_bytes = 0
        self.on_device: OrderedDict[int, tuple[torch.UntypedStorage, Event]] = OrderedDict()
        self.on_device_bytes = 0
        self._cursor = 0  # the block that was requested last

    def __enter__(self) -> None:
        """Take the lock."""
        self._mutex.acquire()
        try:
            self._collect()
        except BaseException:  # the device is failing
            self._mutex.release()
            raise

    def __exit__(self, *_: object) -> None:
        """Release the lock, and collect blocks released meanwhile."""
        self._mutex.release()
        if self._released:
            self._drain()

    def __del__(self) -> None:
        """Unneeded copies must not read memory that has been reused."""
        while self.departures:
            self.departures.popleft().end()

    def begin_step(self) -> None:
        """Begin a forward pass."""
        with self:
            self._step = self._step.next()

    def stays(self, storage: torch.UntypedStorage) -> bool:
        """Whether memory that this step saves stays on the device."""
        with self:
            return self._step.stays(storage)

    def renew_lock(self) -> None:
        """In a forked process: replace the lock, which another thread of the parent may have held."""
        self._mutex = threading.Lock()

    # --- As a store -------------------------------------------------------------------------------

    def find(self, key: Hashable) -> Block | None:
        """Return the block of a key, with one more reference, or None."""
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
        *,
        label: Label | None = None,
    ) -> Block:
        """Add a block, see `BlockStore.save`; waits while too many bytes are in flight.

        Raises:
            SpoolError: The writer has failed since, or the spool is closed.
        """
        self._settle(byte_count)
        departure = Departure(self._copier, origin, copy)
        block = self._store.save(key, origin, byte_count, dtype, departure.begin, departure.end, label)
        with self:
            self._add(block)
            self._store.report.offloaded_bytes += departure.byte_count
            if departure.byte_count:
                self.departures.append(departure)
                self.departing_bytes += departure.byte_count
        return block

    def get(self, block: Block) -> torch.UntypedStorage:
        """Return the bytes of a block, on the device, for its later work.

        Raises:
            SpoolError: They cannot be read back from disk, or the writer has failed since.
        """
        with self:
            self._cursor = block.number
            result = self.on_device.get(block.number)
        alive = _alive(block) if result is None else None
        if alive is None:
            if result is None:
                host = self._store.get(block)
                with self:
                    result = self._bring(block, host)
            self._copier.hand_over(*result)
            alive = result[0]
        self._bring_ahead()
        return alive

    def release(self, block: Block) -> None:
        """Drop one reference to a block. Waits for no lock."""
        self._released.append(block)
        self._drain()
        self._store.release(block)

    # --- Within -----------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Collect if the lock is free; its holder collects otherwise."""
        while self._released and self._mutex.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._mutex.release()

    def _settle(self, byte_count: int) -> None:
        """Wait until so many bytes more may leave the device."""
        while True:
            with self:
                if not self.departures or self.departing_bytes + byte_count <= self._window:
                    return
                departure = self.departures.popleft()
                self.departing_bytes -= departure.byte_count
            departure.end()

    def _bring_ahead(self) -> None:
        """Prefetch the next blocks, as far as they are in host memory and there is room."""
        while True:
            with self:
                block = self._next()
            host = None if block is None else self._store.peek(block)
            if block is None or host is None:
                return
            with self:
                if block.number in self.live:
                    self._bring(block, host)

    # --- Under the lock ---------------------------------------------------------------------------

    def _add(self, block: Block) -> None:
        self._users[block.number] += 1
        if block.number not in self.live:
            self.live[block.number] = block
            insort(self._numbers, block.number)

    def _collect(self) -> None:
        """Release blocks without references, and sources of completed copies."""
        while self.departures and self.departures[0].is_over():
            departure = self.departures.popleft()
            self.departing_bytes -= departure.byte_count
            departure.end()
        while self._released:
            number = self._released.popleft().number
            self._users[number] -= 1
            if not self._users[number]:
                del self._users[number]
                del self.live[number]
                self._forget(number)
        if len(self._numbers) > 2 * len(self.live) + 64:
            self._numbers = sorted(self.live)

    def _next(self) -> Block | None:
        """Return the block that is needed next and is not on the device, if there is room for it."""
        position = bisect_left(self._numbers, self._cursor)
        device_bytes = 0
        while position and device_bytes <= self._window:
            position -= 1
            block = self.live.get(self._numbers[position])
            if block is None:
                continue
            if block.number not in self.on_device and _alive(block) is None:
                return block if self._has_room(block.byte_count) else None
            device_bytes += block.byte_count
        return None

    def _has_room(self, byte_count: int) -> bool:
        """Release used blocks until there is room for one more; returns whether there is."""
        used = [number for number in self.on_device if number > self._cursor]
        while used and self.on_device_bytes + byte_count > self._window:
            self._forget(used.pop(0))
        return not self.on_device or self.on_device_bytes + byte_count <= self._window

    def _bring(self, block: Block, host: torch.UntypedStorage) -> tuple[torch.UntypedStorage, Event]:
        result = self.on_device.get(block.number)
        if result is None:
            self._has_room(block.byte_count)
            result = self.on_device[block.number] = self._copier.to_device(host)
            self.on_device_bytes += block.byte_count
        return result

    def _forget(self, number: int) -> None:
        result = self.on_device.pop(number, None)
        if result is not None:
            self.on_device_bytes -= result[0].nbytes()


class Tiers:
    """The tiers of a spool: one for each device.

    Args:
        store: The store in host memory and on disk.
        window_bytes: See `DeviceTier`.
        copier_of: The copier of a device; None where the store itself takes its tensors, or nothing does.
        staying_bytes: See `DeviceTier`.
    """

    def __init__(
        self,
        store: BlockStore,
        window_bytes: int,
        copier_of: Callable[[torch.device], Copier | None],
        staying_bytes: int = 0,
    ) -> None:
        self._store, self._window, self._copier_of = store, window_bytes, copier_of
        self._staying = staying_bytes
        self._homes: dict[torch.device, BlockStore | DeviceTier | None] = {}
        self._lock = threading.Lock()

    def begin_step(self) -> None:
        """Begin a forward pass."""
        self._store.begin_step()
        for home in list(self._homes.values()):
            if isinstance(home, DeviceTier):
                home.begin_step()

    def stays(self, storage: torch.UntypedStorage) -> bool:
        """Whether memory that this step saves stays on its device."""
        if not self._staying:
            return False
        home = self.home_of(storage.device)
        return isinstance(home, DeviceTier) and home.stays(storage)

    def home_of(self, device: torch.device) -> BlockStore | DeviceTier | None:
        """Return the store or tier for tensors of a device; None where they stay."""
        if device not in self._homes:
            with self._lock:
                if device not in self._homes:
                    self._homes[device] = self._home(device)
        return self._homes[device]

    def renew_locks(self) -> None:
        """In a forked process: replace the locks, which other threads of the parent may have held."""
        self._lock = threading.Lock()
        for home in self._homes.values():
            if isinstance(home, DeviceTier):
                home.renew_lock()

    def _home(self, device: torch.device) -> BlockStore | DeviceTier | None:
        copier = self._copier_of(device)
        if copier is not None:
            return DeviceTier(self._store, copier, self._window, self._staying)
        return self._store if device.type == "cpu" else None


def _alive(block: Block) -> torch.UntypedStorage | None:
    """Return the memory that a block was copied from, if it is all of the block and still alive."""
    storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(block.origin.cdata)
    return storage if storage is not None and storage.nbytes() == block.byte_count else None
