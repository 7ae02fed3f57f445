"""Deterministic algorithms for the time of a step."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def deterministic(is_wanted: bool) -> Iterator[None]:
    """Let `torch.use_deterministic_algorithms` hold inside the context; behind it all is as before.

    On a GPU the process needs `CUBLAS_WORKSPACE_CONFIG=:4096:8`, or torch refuses matrix products.
    """
    if not is_wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=only_warns)
