"""Background thread: works for an object without keeping it alive."""

import contextlib
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

Owner = TypeVar("Owner")


class Worker(Generic[Owner]):
    """Runs `work(owner, is_idle)` on its own thread whenever it is poked, until it is stopped.

    Ends at once when it is stopped, or when the owner is gone. `poke` and `stop` may be
    called from anywhere, also by the garbage collector: they take no lock.

    Args:
        owner: The first argument of `work`. Not kept alive while idle.
        work: Processes all pending work. `is_idle` means that there was no poke for `rest_s`.
        name: Of the thread.
        rest_s: Idle time in seconds after which `work` runs anyway; never when None.
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

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def poke(self) -> None:
        """Wake the thread: there is work."""
        if not self._is_poked:
            self._is_poked = True
            self._inbox.put(True)

    def stop(self) -> None:
        """End the thread after its present work."""
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
            self._is_poked = False  # before the work: a poke during it may bring more
            owner = me()
            if owner is None:
                return
            if goes_on:
                work(owner, is_idle)
            del owner
