"""Gateways that go while clients call them: calls wait for a new one at the same address, or take another."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import trocar
from tests.support.oracles.tiny_training import MODELS as TRAINED
from tests.support.oracles.tiny_training import PlainTrainer, make_trainer, samples
from tests.support.servers.gateway import Gateway, is_serving
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.waiting import wait_until
from trocar.errors import ServerUnavailableError

BATCH = samples(4, 0)
Work = Callable[[trocar.Client], object]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(models=TRAINED, device="cpu") as server:
        yield server


def opened(server: RunningServer, port: str = "0") -> Gateway:
    gateway = Gateway(server, models=["tiny"], port=int(port))
    wait_until(lambda: is_serving(gateway))
    return gateway


def port_of(gateway: Gateway) -> str:
    return gateway.address.rpartition(":")[2]


def extract(client: trocar.Client) -> np.ndarray[Any, Any]:
    return client.extract("tiny", BATCH[0], ["fc"])["fc"]


def stream(client: trocar.Client) -> list[np.ndarray[Any, Any]]:
    with client.extract_stream("tiny", [BATCH[0]] * 2, ["fc"]) as results:
        return [result.unwrap()["fc"] for result in results]


def upload(client: trocar.Client) -> int:
    stored = client.upload_dataset(BATCH[0], targets=BATCH[1], name="gone", shard_bytes=4096)
    client.delete_dataset(stored.dataset_id)
    return stored.sample_count


CALLS: dict[str, Work] = {
    "models": lambda client: client.models()[0].model_id,
    "extract": extract,
    "stream": stream,
    "upload": upload,
    "trainers": lambda client: len(client.trainers()),
}


@pytest.mark.parametrize("direct", [False, True])
def test_calls_wait_for_a_new_gateway(server: RunningServer, direct: bool) -> None:
    gateway = opened(server)
    with trocar.connect(gateway.address, retries=1, direct=direct) as client:
        assert client.is_serving()
        trainer, plain = make_trainer(client), PlainTrainer()
        losses = [trainer.step(*BATCH).loss]
        expected = {name: call(client) for name, call in CALLS.items()}
        gateway.stop()
        with pytest.raises(ServerUnavailableError):
            client.is_serving()
        with ThreadPoolExecutor(len(CALLS) + 1) as pool:
            waiting = {name: pool.submit(call, client) for name, call in CALLS.items()}
            step = pool.submit(trainer.step, *BATCH)
            again = opened(server, port_of(gateway))
            try:
                for name, call in waiting.items():
                    np.testing.assert_equal(call.result(), expected[name])
                losses.append(step.result().loss)
            finally:
                again.stop()
    assert losses == [plain.step(BATCH) for _ in range(2)]


async def test_with_asyncio_too(server: RunningServer) -> None:
    gateway = opened(server)
    async with trocar.aio.connect(gateway.address, retries=1) as client:
        expected = [model.model_id for model in await client.models()]
        gateway.stop()
        with ThreadPoolExecutor(1) as pool:
            opening = pool.submit(opened, server, port_of(gateway))
            found = await client.models()
            opening.result().stop()
    assert [model.model_id for model in found] == expected


def test_another_gateway_of_the_list_is_taken(server: RunningServer) -> None:
    gateways = [opened(server), opened(server)]
    try:
        with trocar.connect(",".join(one.address for one in gateways), retries=1) as client:
            trainer = make_trainer(client)
            expected = {name: call(client) for name, call in CALLS.items()}
            for index, gateway in enumerate(gateways):
                gateway.stop()
                for name, call in CALLS.items():
                    np.testing.assert_equal(call(client), expected[name])
                assert trainer.step(*BATCH).number == index
                gateways[index] = opened(server, port_of(gateway))
            trainer.close()
    finally:
        for gateway in gateways:
            gateway.stop()


def test_who_wants_no_retries_does_not_wait(server: RunningServer) -> None:
    gateway = opened(server)
    with trocar.connect(gateway.address, retries=0, direct=False) as client:
        extract(client)
        gateway.stop()
        for call in CALLS.values():
            with pytest.raises(ServerUnavailableError):
                call(client)
