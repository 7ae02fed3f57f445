"""Block registry: blocks by key under one lock, reference-counted, with shutdown.

# Note: [The garbage collector may come at any time]
The last reference to a saved tensor may be dropped anywhere: in another thread, or while this thread holds
the lock, because any allocation may start the garbage collector. So `release` waits for no lock. The holder
of the lock does the remaining work when releasing it; files, which have a lock of their own, are left to the
writer thread.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from trocar_server.spool.blocks.ledger import Ledger
from trocar_server.spool.files.block_transfer import Place
from trocar_server.spool.files.entries import Block, EntryState
from trocar_server.spool.report import Report
from trocar_server.spool.spool_errors import SpoolError


class Blocks:
    """Blocks in memory and on disk, and their lock: a context for every method but `release`.

    Args:
        ledger: The placement policy.
        report: Counts waiting.
        generation: Blocks of other ones are left alone: they belong to the parent of a fork.

    Attributes:
        is_closed: Whether reading and writing have ended.
        poke_writer: Wakes the writer thread.
        poke_reader: Wakes the reader thread.
        by_key: Blocks with references, for tensors that are saved again.
        released: Blocks that lost a reference and are not collected yet.
        waiting_count: Threads that wait for a notification.
        changed: Notifies these threads.
        error: The writer's error, until a caller has raised it.
    """

    def __init__(self, ledger: Ledger, report: Report, generation: int) -> None:
        self.is_closed = False
        self.poke_writer: Callable[[], None] = _nobody
        self.poke_reader: Callable[[], None] = _nobody
        self._ledger, self._report, self._generation = ledger, report, generation
        self._mutex = threading.Lock()
        self.changed = threading.Condition(self._mutex)
        self.waiting_count = 0
        self.by_key: dict[Hashable, Block] = {}
        self.released: deque[Block] = deque()
        self._left: deque[Place] = deque()
        self.error: SpoolError | None = None
        self._failed: Block | None = None

    def __enter__(self) -> None:
        """Take the lock."""
        self._mutex.acquire()

    def __exit__(self, *_: object) -> None:
        """Release the lock, and collect blocks released meanwhile."""
        self._mutex.release()
        if self.released:
            self._drain()

    @contextmanager
    def unlocked(self) -> Iterator[None]:
        """Release the lock inside the context."""
        self._mutex.release()
        try:
            yield
        finally:
            self._mutex.acquire()

    # --- Without the lock -------------------------------------------------------------------------

    def release(self, block: Block) -> None:
        """Drop one reference to a block. Waits for no lock."""
        self.released.append(block)
        self._drain()

    def left_places(self) -> Iterator[Place]:
        """Yield the places on disk that are free again, each once."""
        while self._left:
            yield self._left.popleft()

    # --- Under the lock ---------------------------------------------------------------------------

    def find(self, key: Hashable) -> Block | None:
        """Return the block of a key, with one more reference, or None."""
        block = self.by_key.get(key)
        if block is not None:
            block.users += 1
        return block

    def add(self, block: Block) -> None:
        """Add a new block, for which there is room."""
        self.by_key[block.key] = block
        self._ledger.add(block)

    def leave(self, place: Place) -> None:
        """Mark a place on disk as free; see Note: [The garbage collector may come at any time]."""
        self._left.append(place)
        self.poke_writer()

    def collect(self) -> None:
        """Remove blocks without references."""
        dropped = False
        while self.released:
            block = self.released.popleft()
            block.users -= 1
            if block.users == 0 and block.generation == self._generation:
                self._drop(block)
                dropped = True
        if dropped:
            self.notify()

    def notify(self) -> None:
        """Notify waiting threads that a block was written, read or dropped, or that the store is closed."""
        if self.waiting_count:
            self.changed.notify_all()

    def wait(self) -> None:
        """Wait for a notification."""
        started = time.perf_counter()
        self.waiting_count += 1
        try:
            self.changed.wait()
        finally:
            self.waiting_count -= 1
            self._report.stalled(time.perf_counter() - started)
        self.collect()

    def fail(self, block: Block, error: SpoolError) -> None:
        """Keep the writer's error at a block, for the next caller that reads or saves."""
        self.error, self._failed = error.with_traceback(None), block  # the traceback keeps the tensor alive

    def raise_failure(self) -> None:
        """Raise the writer's error, unless the graph that it wrote for is gone.

        Raises:
            SpoolError: The writer failed.
        """
        if self.error is None:
            return
        error, failed, self.error, self._failed = self.error, self._failed, None, None
        try:
            if failed is None or failed.state is not EntryState.GONE:
                raise error
        finally:
            del error  # otherwise this frame, the error and the callers' tensors form a reference cycle

    # --- Within -----------------------------------------------------------------------------------

    def _drop(self, block: Block) -> None:
        if self.by_key.get(block.key) is block:
            del self.by_key[block.key]
        self._ledger.drop(block)
        place, block.place = block.place, None
        if place is not None:
            self.leave(place)

    def _drain(self) -> None:
        """Collect if the lock is free; its holder collects otherwise."""
        while self.released and self._mutex.acquire(blocking=False):
            try:
                self.collect()
                if self._ledger.next_to_read() is not None:
                    self.poke_reader()
            finally:
                self._mutex.release()


def _nobody() -> None:
    """There is no thread to wake."""
