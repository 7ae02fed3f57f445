"""Processes for scripts that fork, are killed, or end in the middle of things; a quick garbage collector."""

import gc
from collections.abc import Iterator

import pytest

from tests.support.spool_processes import Processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    with Processes() as opened:
        yield opened


@pytest.fixture(scope="package", autouse=True)
def frozen() -> Iterator[None]:
    """What is there before the first test is left out of collections, of which these tests ask for many."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
