"""Processes for scripts that fork or are killed, a device, and a quick garbage collector."""

import gc
from collections.abc import Iterator

import pytest

from tests.support.spool.spool_devices import LateCopier, all_tensors_on_a_device
from tests.support.spool.spool_processes import Processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    with Processes() as opened:
        yield opened


@pytest.fixture
def copier() -> Iterator[LateCopier]:
    """The device whose memory all tensors are in, for spools that are made in the test."""
    with all_tensors_on_a_device() as found:
        yield found


@pytest.fixture(scope="package", autouse=True)
def frozen() -> Iterator[None]:
    """What is there before the first test is left out of collections, of which these tests ask for many."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
