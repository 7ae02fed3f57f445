"""Stopping a pass from outside: a deadline or a cancel is noticed at the next module.

A deadline does not stop a Python handler, and nothing can interrupt a kernel, so every module of a
replica has a forward-pre hook that looks at the guard of the call under way.
"""

import time

from torch import nn

from trocar_api.reasons import ErrorReason


class PassAborted(BaseException):
    """The pass was stopped by its guard. Not an `Exception`: a model's own `except` must not eat it."""

    def __init__(self, reason: ErrorReason) -> None:
        super().__init__(reason)
        self.reason = reason


class PassGuard:
    """Says whether a pass may go on. One thread runs the pass, any other may cancel it.

    Args:
        deadline: A time of `time.monotonic()` in seconds, or None for no deadline.
    """

    def __init__(self, deadline: float | None = None) -> None:
        self._deadline = deadline
        self._is_cancelled = False

    def cancel(self) -> None:
        """Stop the pass at its next module."""
        self._is_cancelled = True

    def check(self) -> None:
        """Raise when the pass has to stop.

        Raises:
            PassAborted: With `CANCELLED` or `DEADLINE_EXCEEDED`.
        """
        if self._is_cancelled:
            raise PassAborted(ErrorReason.CANCELLED)
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise PassAborted(ErrorReason.DEADLINE_EXCEEDED)


class GuardSlot:
    """Holds the guard of the pass under way on one replica."""

    def __init__(self) -> None:
        self.guard = PassGuard()

    def __call__(self, *_: object) -> None:
        """Be the forward-pre hook."""
        self.guard.check()


def install_guard(module: nn.Module) -> GuardSlot:
    """Give every module of a replica the hook, once and for the replica's life.

    Returns:
        The slot into which each pass puts its guard.
    """
    slot = GuardSlot()
    for child in module.modules():
        child.register_forward_pre_hook(slot)
    return slot
