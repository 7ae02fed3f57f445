import asyncio
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

import trocar
from tests.unit.client.fake_server import FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    fake.start()
    yield fake
    fake.stop()


class _Blocking:
    """An asyncio client whose methods block, so that one test serves both clients."""

    def __init__(self, target: str, **options: Any) -> None:
        self._runner = asyncio.Runner()
        self._client = self._runner.run(self._connect(target, options))

    async def _connect(self, target: str, options: dict[str, Any]) -> trocar.AsyncClient:
        return trocar.aio.connect(target, **options)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)
        return lambda *arguments, **options: self._runner.run(method(*arguments, **options))

    def close(self) -> None:
        self._runner.run(self._client.close())
        self._runner.close()


Connect = Callable[..., trocar.Client]


@pytest.fixture(params=["sync", "aio"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Connects a client of either kind; every test that uses it runs with both."""
    opened: list[trocar.Client] = []

    def connected(target: str, **options: Any) -> trocar.Client:
        if request.param == "sync":
            opened.append(trocar.connect(target, **options))
        else:
            opened.append(cast(trocar.Client, _Blocking(target, **options)))
        return opened[-1]

    yield connected
    for client in opened:
        client.close()


@pytest.fixture
def client(connect: Connect, server: FakeServer) -> trocar.Client:
    return connect(server.target)
