"""Random programs over autograd come to the same with a spool; thousands: `tests/sweeps/spool_graphs.py`."""

import os
from pathlib import Path

import pytest
import torch

from tests.support.spool.spool_fuzz import failure

_SEEDS = int(os.environ.get("TROCAR_SPOOL_GRAPHS", "40"))


@pytest.fixture(autouse=True)
def one_thread() -> object:
    """A sum by several threads has no fixed order."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(count)


@pytest.mark.parametrize("first", range(0, _SEEDS, 10))
def test_random_programs_come_to_the_same(tmp_path: Path, first: int) -> None:
    found = {seed: failure(seed, tmp_path) for seed in range(first, first + 10)}
    assert not {seed: text for seed, text in found.items() if text is not None}


def test_programs_in_three_threads_at_once_come_to_the_same(tmp_path: Path) -> None:
    found = {seed: failure(seed, tmp_path, thread_count=3) for seed in range(1000, 1005)}
    assert not {seed: text for seed, text in found.items() if text is not None}
