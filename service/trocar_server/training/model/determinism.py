"""Deterministic algorithms during a step."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


def determinism(is_wanted: bool) -> Callable[[], AbstractContextManager[None]]:
    """Return what makes contexts with `torch.use_deterministic_algorithms`, or ones that change nothing.

    On a GPU the process needs `CUBLAS_WORKSPACE_CONFIG=:4096:8`, or torch refuses matrix products.
    """
    return _deterministic if is_wanted else nullcontext


@contextmanager
def _deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)
