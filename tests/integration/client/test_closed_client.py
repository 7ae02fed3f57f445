"""Calls on a client that is closed before them, or by another thread as they begin."""

import asyncio
import copy
import pickle
from collections.abc import Callable, Coroutine
from pathlib import Path

import numpy as np
import pytest
import torch

import trocar
from tests.support.oracles.oracle import noise
from tests.support.servers.running_server import RunningServer
from trocar.aio import AsyncTrainer

IMAGES = noise(2, 3, 32, 32)
LABELS = np.array([0, 1])
CALLS: dict[str, Callable[[trocar.Client, trocar.training.Trainer], object]] = {
    "models": lambda client, _: client.models(),
    "extract": lambda client, _: client.extract("plain", IMAGES, "fc"),
    "extract, chunks": lambda client, _: client.extract(
        "plain", IMAGES, "fc", options=trocar.options(chunk_bytes=4096)
    ),
    "stream": lambda client, _: list(client.extract_stream("plain", [IMAGES], "fc")),
    "step": lambda _, trainer: trainer.step(IMAGES, LABELS),
}
CLOSED = r"the client of .* was closed; connect again, `client = trocar\.connect\("


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_a_call_after_the_close_says_so(server: RunningServer, call: Callable[..., object]) -> None:
    with trocar.connect(server.address) as client:
        trainer = client.train("plain")
    with pytest.raises(trocar.errors.ServerUnavailableError, match=CLOSED):
        call(client, trainer)


@pytest.mark.parametrize("call", CALLS.values(), ids=list(CALLS))
def test_a_call_that_begins_as_the_client_is_closed_says_so(
    server: RunningServer, call: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    client = trocar.connect(server.address)
    trainer = client.train("plain")
    connection = client._connection
    begin = connection.begin

    def begin_and_close(method: Callable[..., object], *args: object, **options: object) -> object:
        def closed_after_the_look(*args: object, **options: object) -> object:
            client.close()
            return method(*args, **options)

        return begin(closed_after_the_look, *args, **options)

    monkeypatch.setattr(connection, "begin", begin_and_close)
    with pytest.raises(trocar.errors.ServerUnavailableError, match=CLOSED):
        call(client, trainer)


LARGE = np.ones((4096, 96), np.float32)
MODEL = {"module": torch.nn.Identity(), "input_shape": (96,)}


async def watched(trainer: AsyncTrainer) -> None:
    async for _ in trainer.watch():
        pass


async def test_calls_over_shared_memory_after_the_close_say_so(tmp_path: Path) -> None:
    (tmp_path / "adapter_model.safetensors").write_bytes(b"adapter")
    async with trocar.aio.connect("local", models={"same": MODEL}) as client:
        await client.extract("same", LARGE, "/out")
        prepared = await client.prepare("same", LARGE[:1], "/out")
        trainer = AsyncTrainer(client._connection, "0" * 32)
    for call in (
        lambda: client.extract("same", LARGE, "/out"),
        lambda: prepared(LARGE[:1]),
        lambda: watched(trainer),
        lambda: trainer.load_adapter(tmp_path),
    ):
        with pytest.raises(trocar.errors.ServerUnavailableError, match=CLOSED):
            await call()
    assert (await client.shared_array((4096, 96))).shape == (4096, 96)


def test_a_fit_is_not_followed_after_the_close(server: RunningServer) -> None:
    with trocar.connect(server.address) as client:
        trainer = client.train("plain")
    with pytest.raises(trocar.errors.ServerUnavailableError, match=CLOSED):
        next(iter(trainer.watch()))


def test_a_client_of_an_earlier_event_loop_says_so(server: RunningServer) -> None:
    async def connected() -> tuple[trocar.aio.AsyncClient, AsyncTrainer]:
        client = trocar.aio.connect(server.address)
        return client, await client.train("plain")

    client, trainer = asyncio.run(connected())
    calls: list[Callable[[], Coroutine[object, object, object]]] = [
        client.models,
        lambda: client.extract("plain", IMAGES, "fc"),
        lambda: client.extract("plain", IMAGES, "fc", options=trocar.options(chunk_bytes=4096)),
        lambda: trainer.step(IMAGES, LABELS),
    ]
    for call in calls:
        with pytest.raises(trocar.errors.ServerUnavailableError, match="connected in another event loop"):
            asyncio.run(call())
    asyncio.run(client.close())


def test_a_client_needs_an_event_loop() -> None:
    asyncio.set_event_loop(None)
    with pytest.raises(ValueError, match="no event loop runs here"):
        trocar.aio.connect("localhost:1")


def test_a_client_made_outside_of_an_event_loop_says_so(server: RunningServer) -> None:
    outside = asyncio.new_event_loop()
    asyncio.set_event_loop(outside)  # as the first use of asyncio does in the main thread
    client = trocar.aio.connect(server.address)

    async def models() -> None:
        with pytest.raises(trocar.errors.ServerUnavailableError, match="outside of any"):
            await client.models()
        await client.close()

    asyncio.run(models())
    outside.close()


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy])
def test_a_client_and_its_parts_are_not_copied(
    server: RunningServer, copied: Callable[[object], object]
) -> None:
    with trocar.connect(server.address) as client, client.train("plain") as trainer:
        prepared = client.prepare("plain", IMAGES, "fc")
        for part in (client, trainer, prepared):
            with pytest.raises(TypeError, match=r"call trocar\.connect in each process"):
                copied(part)
