"""Connections that break while inputs are sent: the call is made again, and nothing is lost or doubled."""

from collections.abc import Iterator

import numpy as np
import pytest

import trocar
from tests.support.models.odd_models import Identity
from tests.support.oracles.oracle import noise
from tests.support.servers.proxy import Proxy, running_proxy
from tests.support.servers.running_server import running_server
from tests.support.servers.serving import custom
from tests.support.servers.waiting import wait_until
from trocar.errors import ServerUnavailableError

KIB, MIB = 1 << 10, 1 << 20
LARGE = noise(3, 1024, 1024)
"""12 MiB: more than gRPC's own retries keep."""
MIDDLE = noise(3, 512, 1024)
"""6 MiB: several messages, that gRPC's own retries would keep and lose."""
ONE_MESSAGE = noise(3, 256, 1024)


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    with (
        running_server(models={"identity": custom(Identity)}, device="cpu") as server,
        running_proxy(server.address) as running,
    ):
        yield running


@pytest.fixture
def client(proxy: Proxy) -> Iterator[trocar.Client]:
    with trocar.connect(proxy.address) as connected:
        connected.server_info()
        yield connected


@pytest.mark.parametrize("share", [0.001, 0.2, 0.5, 0.8, 0.999])
@pytest.mark.parametrize("batch", [ONE_MESSAGE, MIDDLE, LARGE], ids=["3 MiB", "6 MiB", "12 MiB"])
def test_a_connection_that_breaks_on_the_way_up_costs_a_second_attempt(
    proxy: Proxy, client: trocar.Client, batch: np.ndarray, share: float
) -> None:
    connections = proxy.connection_count
    proxy.break_after(int(batch.nbytes * share))
    maps = client.extract("identity", batch, "identity")
    assert np.array_equal(maps["identity"], batch)
    assert proxy.connection_count == connections + 1


async def test_the_asyncio_client_tries_again_too(proxy: Proxy) -> None:
    async with trocar.aio.connect(proxy.address) as client:
        for share in (0.001, 0.5, 0.999):
            proxy.break_after(int(LARGE.nbytes * share))
            maps = await client.extract("identity", LARGE, "identity")
            assert np.array_equal(maps["identity"], LARGE)


def test_gradients_try_again_too(proxy: Proxy, client: trocar.Client) -> None:
    proxy.break_after(MIB)
    found = client.gradients("identity", LARGE, of=trocar.value("identity"), at="/in")
    assert np.array_equal(found["/in"], np.ones_like(LARGE))


def test_without_retries_the_caller_hears_of_it(proxy: Proxy) -> None:
    with trocar.connect(proxy.address, retries=0) as client:
        client.server_info()
        proxy.break_after(100 * KIB)
        with pytest.raises(ServerUnavailableError):
            client.extract("identity", LARGE, "identity")
        wait_until(lambda: _answers(client))  # the broken connection may take the next call down, too
        assert np.array_equal(client.extract("identity", MIDDLE, "identity")["identity"], MIDDLE)


def _answers(client: trocar.Client) -> bool:
    try:
        client.server_info()
    except ServerUnavailableError:
        return False
    return True


def test_a_stream_sends_its_batches_again(proxy: Proxy, client: trocar.Client) -> None:
    batches = [MIDDLE + number for number in range(4)]
    proxy.break_after(9 * MIB)
    with client.extract_stream("identity", batches, "identity") as stream:
        for result in stream:
            assert np.array_equal(result.unwrap()["identity"], batches[result.index])
            assert result.index < len(batches)
