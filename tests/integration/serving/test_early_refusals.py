"""Calls that the server refuses while their requests are still being sent: its own answer arrives."""

from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest

import trocar
from tests.support.models.gated_models import WAIT_S, Gate, Gated
from tests.support.models.odd_models import Identity
from tests.support.oracles.oracle import noise
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.scraping import scrape
from tests.support.servers.serving import Serve, custom
from tests.support.servers.waiting import wait_until
from tests.support.wire.wire import extract_call, raw_channel
from trocar._wire import requests
from trocar.errors import TokenInvalidError
from trocar_api.wire import HEAD_KEY

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


# --- Before the payloads are read -------------------------------------------------------------------------

BATCH = np.ones((25_000, 3), np.float32)
"""300,000 bytes: one message."""


@pytest.fixture
def full(serve: Serve, gate: Gate) -> Iterator[RunningServer]:
    """A server whose model computes for one call and has one more in its line, which is as long as may be."""
    running = serve(
        models={"gated": custom(Gated)}, limits={"max_queue": 1, "max_batch": 1 << 20}, metrics_port=0
    )
    with trocar.connect(running.address) as client, ThreadPoolExecutor(2) as background:
        client.extract("gated", BATCH, "last")
        gate.hold()
        calls = [
            background.submit(
                client.extract, "gated", BATCH, "last", options=trocar.options(timeout_s=WAIT_S)
            )
        ]
        assert gate.entered.wait(WAIT_S)
        calls.append(
            background.submit(
                client.extract, "gated", BATCH, "last", options=trocar.options(timeout_s=WAIT_S)
            )
        )
        pool = running.engine.deployment("gated").pool
        wait_until(lambda: pool.waiting_count == 1)
        yield running
        gate.release()
        assert all(call.result(WAIT_S)["last"].shape == BATCH.shape for call in calls)


def received_bytes(server: RunningServer) -> float:
    return scrape(server).value("trocar_request_bytes_total", model="gated")


async def test_a_busy_server_refuses_a_call_by_its_head(full: RunningServer) -> None:
    before = received_bytes(full)
    async with trocar.aio.connect(full.address, retries=0) as client:
        for _ in range(TIMES):
            with pytest.raises(trocar.errors.ServerBusyError, match="1 calls already wait") as caught:
                await client.extract("gated", BATCH, "last")
            assert caught.value.retry_after_s is not None
    with trocar.connect(full.address, retries=0) as own, pytest.raises(trocar.errors.ServerBusyError):
        own.extract("gated", BATCH, "last")
    assert received_bytes(full) == before


@pytest.mark.parametrize("head", [b"", b"\xff\xfe", bytes(4000)])
def test_a_false_head_changes_nothing(full: RunningServer, head: bytes) -> None:
    message = requests.extract_call("gated", BATCH, "last").message()
    with raw_channel(full.address) as channel, pytest.raises(grpc.RpcError, match="1 calls already wait"):
        list(extract_call(channel, [message], metadata=[(HEAD_KEY, head)]))


def test_a_small_call_has_no_copy_of_its_head() -> None:
    assert requests.extract_call("gated", BATCH[:100], "last").headers == ()
    assert [key for key, _ in requests.extract_call("gated", BATCH, "last").headers] == [HEAD_KEY]
