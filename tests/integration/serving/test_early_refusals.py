"""Calls that the server refuses while their requests are still being sent: its own answer arrives."""

from collections.abc import Awaitable, Callable, Iterator

import pytest

import trocar
from tests.support.models.odd_models import Identity
from tests.support.oracles.oracle import noise
from tests.support.servers.running_server import running_server
from tests.support.servers.serving import custom
from trocar.errors import TokenInvalidError

LARGE = noise(4, 3, 512, 512)
"""12 MiB: many messages."""
TIMES = 10
"""grpc.aio loses nine of ten answers where they are not kept."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running_server(models={"identity": custom(Identity)}, device="cpu", tokens=True) as server:
        yield server.address


async def extract(client: trocar.aio.AsyncClient) -> None:
    await client.extract("identity", LARGE, "identity")


async def extract_stream(client: trocar.aio.AsyncClient) -> None:
    async with client.extract_stream("identity", [LARGE] * 3, "identity") as stream:
        async for result in stream:
            result.unwrap()


CALLS: list[Callable[[trocar.aio.AsyncClient], Awaitable[None]]] = [extract, extract_stream]


@pytest.mark.parametrize("call", CALLS)
async def test_the_reason_of_the_server_is_told(
    address: str, call: Callable[[trocar.aio.AsyncClient], Awaitable[None]]
) -> None:
    async with trocar.aio.connect(address, token="trocar_" + "A" * 43, retries=0) as client:
        for _ in range(TIMES):
            with pytest.raises(TokenInvalidError):
                await call(client)
