"""Replicas without Ray, and clients of each."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import trocar
from tests.support.servers.replicas import Replicas


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    with ExitStack() as stack:
        yield Replicas(tmp_path, stack)


@pytest.fixture
def clients() -> Iterator[Any]:
    with ExitStack() as stack:
        yield lambda server: stack.enter_context(trocar.connect(server.address, retries=0))
