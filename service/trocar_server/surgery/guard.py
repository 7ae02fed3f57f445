"""Stopping a pass from outside: a deadline or a cancel is noticed at the next module.

A deadline does not stop a Python handler, and nothing can interrupt a kernel. So whoever stops a pass puts
a forward-pre hook on every module of the running replica, and the next module that is called raises. A
pass that nobody stops has no such hooks, and costs nothing.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock

from torch import nn

from trocar_api.reasons import ErrorReason


class PassAborted(BaseException):
    """The pass was stopped by its guard. Not an `Exception`: a model's own `except` must not eat it."""

    def __init__(self, reason: ErrorReason) -> None:
        super().__init__(reason)
        self.reason = reason


class PassGuard:
    """Says whether a pass may go on. One thread runs the pass, any other may stop it.

    Args:
        deadline: A time of `time.monotonic()` in seconds after which no pass begins, or None. Whoever
            set it calls `expire` when it passes.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self._deadline = deadline
        self._reason: ErrorReason | None = None
        self._module: nn.Module | None = None
        self._hooks = ExitStack()
        self._lock = Lock()

    def cancel(self) -> None:
        """Stop the pass at its next module: the caller has no use for it any more."""
        self._stop(ErrorReason.CANCELLED)

    def expire(self) -> None:
        """Stop the pass at its next module: its deadline has passed."""
        self._stop(ErrorReason.DEADLINE_EXCEEDED)

    def check(self, *_: object) -> None:
        """Raise when the pass has to stop; also fit to be a forward-pre hook.

        Raises:
            PassAborted: With `CANCELLED` or `DEADLINE_EXCEEDED`.
        """
        if self._reason is not None:
            raise PassAborted(self._reason)
        if self._is_late():
            raise PassAborted(ErrorReason.DEADLINE_EXCEEDED)

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Let a stop reach a pass of this module inside the context."""
        with self._lock:
            self._module = module
            if self._reason is not None or self._is_late():
                self._attach()
        try:
            yield
        finally:
            with self._lock:
                self._module = None
                self._hooks.close()

    def _stop(self, reason: ErrorReason) -> None:
        with self._lock:
            self._reason = self._reason or reason
            self._attach()

    def _attach(self) -> None:
        # Adding to a dict of hooks is one step under the GIL, and torch copies the dict before it calls them.
        for child in self._module.modules() if self._module is not None else ():
            self._hooks.callback(child.register_forward_pre_hook(self.check).remove)

    def _is_late(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline
