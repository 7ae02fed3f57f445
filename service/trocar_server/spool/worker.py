"""A thread that works for an object without keeping it alive."""

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

Owner = TypeVar("Owner")


class Worker(Generic[Owner]):
    """Runs `work(owner, is_idle)` on a thread of its own whenever it is poked, until it is stopped.

    Ends at once when it is stopped, or when the owner is gone. `poke` and `stop` may be
    called from anywhere, also by the garbage collector: they take no lock.

    Args:
        owner: For whom it works. Not kept alive while there is nothing to do.
        work: Does all there is to do. `is_idle` says that nobody poked for `rest_s`.
        name: Of the thread.
        rest_s: After how long without a poke it works anyway, in seconds; never when None.
    """

    def __init__(
        self, owner: Owner, work: Callable[[Owner, bool], None], name: str, rest_s: float | None = None
    ) -> None:
        self._inbox: queue.SimpleQueue[bool] = queue.SimpleQueue()  # its `put` is reentrant
        self._is_poked = False
        wake = self._inbox.put
        arguments = (weakref.ref(owner, lambda _: wake(False)), work, rest_s)
        self._thread = threading.Thread(target=self._run, args=arguments, name=name, daemon=True)
        self._thread.start()

    def poke(self) -> None:
        """Say that there is something to do."""
        if not self._is_poked:
            self._is_poked = True
            self._inbox.put(True)

    def stop(self) -> None:
        """End the thread when it has done what it is doing."""
        self._inbox.put(False)

    def join(self, timeout_s: float) -> None:
        """Wait until the thread has ended, unless this is the thread."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(
        self, me: "weakref.ref[Owner]", work: Callable[[Owner, bool], None], rest_s: float | None
    ) -> None:
        goes_on = True
        while goes_on:
            is_idle = True
            with contextlib.suppress(queue.Empty):
                goes_on = self._inbox.get(timeout=rest_s)
                is_idle = False
            self._is_poked = False  # before the work: whoever comes now may have something more
            owner = me()
            if owner is None:
                return
            if goes_on:
                work(owner, is_idle)
            del owner
