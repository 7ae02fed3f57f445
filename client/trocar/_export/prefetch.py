"""Prefetch: samples loaded on other threads, ahead of the model, in order and with bounded memory."""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from queue import SimpleQueue
from types import TracebackType
from typing import Generic, Self, TypeAlias, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")
_Slot: TypeAlias = "Future[Result] | BaseException | None"
"""A result to wait for, what the items' iterator raised, or its end."""

WORKERS = 4
"""Threads that read and decode."""
BATCHES_AHEAD = 4
"""How many batches are read before the model wants them."""


class ReadAhead(Generic[Item, Result]):
    """Runs a function over items on other threads; yields results in the order of the items.

        with ReadAhead(paths, read, depth=64) as contents:
            for content in contents: ...

    The items are taken from their iterator on one thread, so it may hold an open file or a dataset
    that is not thread-safe. An exception of the iterator or the function is raised in its place.

    Args:
        items: Items to process; may be endless.
        work: Called with one item, on any thread.
        depth: The most results, ready or in progress, that are not consumed yet.
        workers: Threads that call `work`.
    """

    def __init__(
        self, items: Iterable[Item], work: Callable[[Item], Result], *, depth: int, workers: int = WORKERS
    ) -> None:
        self._items = items
        self._work = work
        self._free = threading.Semaphore(depth)
        self._slots: SimpleQueue[_Slot[Result]] = SimpleQueue()
        self._is_closed = False
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="trocar-read")
        self._feeder = threading.Thread(target=self._feed, name="trocar-ahead", daemon=True)

    def __enter__(self) -> Self:
        self._feeder.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_closed = True
        self._free.release()  # the feeder may wait for it
        self._feeder.join()
        self._slots.put(None)  # a reader on another thread ends
        self._pool.shutdown(cancel_futures=True)

    def __iter__(self) -> Iterator[Result]:
        while (slot := self._slots.get()) is not None:
            if isinstance(slot, BaseException):
                raise slot
            try:
                result = slot.result()
            except CancelledError:  # closed while it waited for a worker
                return
            del slot  # the future references the result: drop it before waiting for the next one
            yield result
            del result
            self._free.release()

    def _feed(self) -> None:
        try:
            for item in self._items:
                self._free.acquire()
                if self._is_closed:
                    return
                self._slots.put(self._pool.submit(self._work, item))
        except BaseException as error:  # noqa: BLE001 - handed to the reading thread
            self._slots.put(error)
        else:
            self._slots.put(None)
