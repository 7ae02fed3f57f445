"""Waiting for what another thread or process brings about."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LIMIT_S = 180.0
_STEP_S = 0.01


def wait_until(is_so: Callable[[], bool]) -> None:
    """Return as soon as it is so; fail when it is not so after three minutes."""
    never = threading.Event()
    for _ in range(int(_LIMIT_S / _STEP_S)):
        if is_so():
            return
        never.wait(_STEP_S)
    assert is_so()


@contextmanager
def no_thread_left(prefix: str = "") -> Iterator[None]:
    """Whatever is done inside: the threads that it started end, those whose names begin so.

    Threads of earlier tests may end meanwhile, so nothing is said of how many there are.
    """
    before = set(threading.enumerate())
    yield
    wait_until(lambda: not [t for t in set(threading.enumerate()) - before if t.name.startswith(prefix)])
