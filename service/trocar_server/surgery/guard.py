"""Cancellation of a pass: a deadline or a cancelled call stops it at the next module.

A deadline does not stop a Python handler, and a running kernel cannot be interrupted. So stopping a pass
registers a forward-pre hook on every module of the running replica, and the next module that is called
raises. A pass that is not stopped has no such hooks, and costs nothing.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock

from torch import nn

from trocar_api.reasons import ErrorReason


class PassAborted(BaseException):
    """The pass was stopped by its guard. Not an `Exception`: a model's own `except` must not catch it."""

    def __init__(self, reason: ErrorReason) -> None:
        super().__init__(reason)
        self.reason = reason


class PassGuard:
    """Cancellation token of a pass. One thread runs the pass, any other may stop it.

    Args:
        deadline: A time of `time.monotonic()` in seconds after which no pass begins, or None. The code
        that set it calls `expire` when it passes.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self._deadline = deadline
        self._reason: ErrorReason | None = None
        self._module: nn.Module | None = None
        self._hooks = ExitStack()
        self._lock = Lock()

    @property
    def left_s(self) -> float | None:
        """Seconds to the deadline, negative after it; None without one."""
        return None if self._deadline is None else self._deadline - time.monotonic()

    def cancel(self) -> None:
        """Stop the pass at its next module: the caller no longer needs it."""
        self._stop(ErrorReason.CANCELLED)

    def expire(self) -> None:
        """Stop the pass at its next module: its deadline has passed."""
        self._stop(ErrorReason.DEADLINE_EXCEEDED)

    def check(self, *_: object) -> None:
        """Raise when the pass has to stop; also usable as a forward-pre hook.

        Raises:
            PassAborted: With `CANCELLED` or `DEADLINE_EXCEEDED`.
        """
        if self._reason is not None:
            raise PassAborted(self._reason)
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise PassAborted(ErrorReason.DEADLINE_EXCEEDED)

    @contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Make passes of this module stoppable inside the context."""
        with self._lock:
            self._module = module
            is_late = self._deadline is not None and time.monotonic() > self._deadline
            if self._reason is not None or is_late:
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
        # Adding to a dict of hooks is atomic under the GIL, and torch copies the dict before it calls them.
        for child in self._module.modules() if self._module is not None else ():
            self._hooks.callback(child.register_forward_pre_hook(self.check).remove)
