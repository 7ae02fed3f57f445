"""Stopping a pass from outside: a deadline or a cancel is noticed at the next module.

A deadline does not stop a Python handler, and nothing can interrupt a kernel, so forward-pre hooks look
at the guard of the call under way.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

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


@contextmanager
def guarded(module: nn.Module, guard: PassGuard) -> Iterator[None]:
    """Check the guard before every module inside the context.

        with guarded(model, PassGuard(deadline)):
            model(batch)

    The hooks cost some 5 microseconds a module. `nn.TransformerEncoderLayer` is left alone, as is what
    is inside it: with any hook there it leaves its fused path, and its numbers would change.
    """

    def check(*_: object) -> None:
        guard.check()

    with ExitStack() as hooks:
        for child in _hookable(module):
            hooks.callback(child.register_forward_pre_hook(check).remove)
        yield


def _hookable(module: nn.Module) -> Iterator[nn.Module]:
    if isinstance(module, nn.TransformerEncoderLayer):
        return
    yield module
    for child in module.children():
        yield from _hookable(child)
