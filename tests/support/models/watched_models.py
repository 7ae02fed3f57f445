"""A small model whose passes a test can wait for, one by one."""

import threading
from collections.abc import Callable
from typing import Any

import torch

from tests.support.models.tiny_models import Plain


class Watch:
    """Calls something at the beginning of a later pass, once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = 0
        self._then: Callable[[], object] = int

    def after(self, passes: int, then: Callable[[], object]) -> None:
        """Call `then` when the pass after so many others begins."""
        with self._lock:
            self._left, self._then = passes, then

    def seen(self) -> None:
        with self._lock:
            self._left -= 1
            is_due = self._left == 0
        if is_due:
            self._then()


WATCH = Watch()


class Watched(Plain):
    """`Plain`, which tells `WATCH` of every pass."""

    def forward(self, x: torch.Tensor) -> Any:
        if x.device.type != "meta":
            WATCH.seen()
        return super().forward(x)
