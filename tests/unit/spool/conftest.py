"""Processes for scripts that fork, are killed, or end in the middle of things."""

from collections.abc import Iterator

import pytest

from tests.support.spool_processes import Processes


@pytest.fixture(scope="session")
def processes() -> Iterator[Processes]:
    with Processes() as opened:
        yield opened
