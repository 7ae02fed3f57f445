"""The blocks that there are, under one lock: known by their keys, counted, taken away in the end.

# Note: [The garbage collector may come at any time]
The last reference to a saved tensor may go anywhere: in another thread, or while this thread holds the lock,
because any allocation may start the garbage collector. So `release` waits for no lock. What it leaves behind
is done by whoever holds the lock, when it is given back; and files, which have a lock of their own, are left
to the writer thread.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from trocar_server.spool.entries import Block, State
from trocar_server.spool.errors import SpoolError
from trocar_server.spool.ledger import Ledger
from trocar_server.spool.report import Report
from trocar_server.spool.transfer import Place


class Blocks:
    """Blocks in memory and on disk, and the lock over them: a context, in which all but `release` is called.

    Args:
        ledger: Its rules.
        report: Where waiting is noted.
        generation: Blocks of other ones are left alone: they belong to the process that this was forked from.

    Attributes:
        is_closed: Whether nothing more is written and read.
        poke_writer: Wakes the thread that writes.
        poke_reader: Wakes the thread that reads.
    """

    def __init__(self, ledger: Ledger, report: Report, generation: int) -> None:
        self.is_closed = False
        self.poke_writer: Callable[[], None] = _nobody
        self.poke_reader: Callable[[], None] = _nobody
        self._ledger, self._report, self._generation = ledger, report, generation
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)
        self._waiting_count = 0
        self._known: dict[Hashable, Block] = {}
        self._released: deque[Block] = deque()
        self._left: deque[Place] = deque()
        self._error: SpoolError | None = None
        self._failed: Block | None = None

    def __enter__(self) -> None:
        """Take the lock."""
        self._mutex.acquire()

    def __exit__(self, *_: object) -> None:
        """Give the lock back, and collect what was released meanwhile."""
        self._mutex.release()
        if self._released:
            self._drain()

    @contextmanager
    def unlocked(self) -> Iterator[None]:
        """Give the lock back for a while."""
        self._mutex.release()
        try:
            yield
        finally:
            self._mutex.acquire()

    # --- Without the lock -------------------------------------------------------------------------

    def release(self, block: Block) -> None:
        """Say that a user of a block is gone. Waits for no lock."""
        self._released.append(block)
        self._drain()

    def left_places(self) -> Iterator[Place]:
        """Take the places on disk that are free again."""
        while self._left:
            yield self._left.popleft()

    # --- Under the lock ---------------------------------------------------------------------------

    def find(self, key: Hashable) -> Block | None:
        """Return a block that is known by a key, with one more user, or None."""
        block = self._known.get(key)
        if block is not None:
            block.users += 1
        return block

    def add(self, block: Block) -> None:
        """Take a new block, for which there is room."""
        self._known[block.key] = block
        self._ledger.add(block)

    def leave(self, place: Place) -> None:
        """Say that a place on disk is free again; see Note: [The garbage collector may come at any time]."""
        self._left.append(place)
        self.poke_writer()

    def collect(self) -> None:
        """Take away blocks that nobody needs any more."""
        dropped = False
        while self._released:
            block = self._released.popleft()
            block.users -= 1
            if block.users == 0 and block.generation == self._generation:
                self._drop(block)
                dropped = True
        if dropped:
            self.notify()

    def notify(self) -> None:
        """Say that a block was written, read or dropped, or that all is closed."""
        if self._waiting_count:
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until somebody notifies."""
        started = time.perf_counter()
        self._waiting_count += 1
        try:
            self._changed.wait()
        finally:
            self._waiting_count -= 1
            self._report.stalled(time.perf_counter() - started)
        self.collect()

    def fail(self, block: Block, error: SpoolError) -> None:
        """Keep what stopped the writer at a block, for the next who asks or saves."""
        self._error, self._failed = error.with_traceback(None), block  # the traceback holds the tensor

    def raise_failure(self) -> None:
        """Raise what stopped the writer, unless the graph is gone for which it wrote.

        Raises:
            SpoolError: It was stopped.
        """
        if self._error is None:
            return
        error, failed, self._error, self._failed = self._error, self._failed, None, None
        try:
            if failed is None or failed.state is not State.GONE:
                raise error
        finally:
            del error  # or this frame, the error and the tensors of all callers hold each other

    # --- Within -----------------------------------------------------------------------------------

    def _drop(self, block: Block) -> None:
        if self._known.get(block.key) is block:
            del self._known[block.key]
        self._ledger.drop(block)
        place, block.place = block.place, None
        if place is not None:
            self.leave(place)

    def _drain(self) -> None:
        """Collect, unless somebody holds the lock: then that one does it."""
        while self._released and self._mutex.acquire(blocking=False):
            try:
                self.collect()
                if self._ledger.next_to_read() is not None:
                    self.poke_reader()
            finally:
                self._mutex.release()


def _nobody() -> None:
    """There is no thread to wake."""
