"""Waiting for what another thread or process brings about."""

import threading
from collections.abc import Callable

_LIMIT_S = 60.0
_STEP_S = 0.01


def wait_until(is_so: Callable[[], bool]) -> None:
    """Return as soon as it is so; fail when it is not so after a minute."""
    never = threading.Event()
    for _ in range(int(_LIMIT_S / _STEP_S)):
        if is_so():
            return
        never.wait(_STEP_S)
    assert is_so()
