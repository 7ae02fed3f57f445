"""Threads of NumPy's BLAS during fits of directions.

# Note: [One BLAS thread]
OpenBLAS's threads spin while they wait for each other. Beside passes, which have all cores, a fit of 2,000
samples of 768 channels took 6.7 s with two threads and 0.8 s with one (NumPy 2.4). torch has a BLAS of its
own, which this leaves alone.
"""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

from threadpoolctl import ThreadpoolController


class _Fits:
    """Fits that are running; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._limit = ExitStack()
        self._count = 0

    def begin(self) -> None:
        """Limit the threads for the first fit."""
        with self._lock:
            if not self._count:
                self._limit.enter_context(_openblas().limit(limits=1))
            self._count += 1

    def end(self) -> None:
        """Give the threads back after the last one."""
        with self._lock:
            self._count -= 1
            if not self._count:
                self._limit.close()


_FITS = _Fits()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Let NumPy's BLAS compute with one thread; the last of several fits gives the others back."""
    _FITS.begin()
    try:
        yield
    finally:
        _FITS.end()


@cache
def _openblas() -> ThreadpoolController:
    return ThreadpoolController().select(internal_api="openblas")
