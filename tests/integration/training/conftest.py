"""Clients of a test's own server, which it calls `running`: its trainers end with it."""

from collections.abc import Iterator

import pytest

import trocar
from tests.support.servers.proxy import Proxy, running_proxy
from tests.support.servers.running_server import RunningServer


@pytest.fixture
def client(running: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(running.address) as connected:
        yield connected


@pytest.fixture
def proxy(running: RunningServer) -> Iterator[Proxy]:
    with running_proxy(running.address) as proxy:
        yield proxy
