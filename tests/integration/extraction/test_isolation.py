"""Requests do not mix, whoever fails and however many there are; nothing is left of any."""

import asyncio
import gc
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import trocar
from tests.support.files.scale import count
from tests.support.models.odd_models import FailsLate, Identity, KeepsState
from tests.support.models.tiny_models import DataDependent, Plain, Structured
from tests.support.oracles.oracle import Array, noise
from tests.support.servers.footprint import hook_counts, live_tensor_count, tensor_count
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import Serve, custom, rebuilt
from tests.support.servers.waiting import wait_until

CLIENTS = 8
CALLS_PER_CLIENT = count(60)


@pytest.fixture(scope="module")
def busy_server() -> Iterator[RunningServer]:
    """A server whose models have one replica or several."""
    models = {
        "plain": custom(Plain, (3, 8, 8), replicas=2),
        "structured": custom(Structured),
        "dependent": custom(DataDependent),
        "identity": custom(Identity, replicas=3),
    }
    with running_server(models=models, device="cpu", limits={"max_queue": 1000}) as running:
        yield running


@pytest.fixture(scope="module")
def busy_client(busy_server: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(busy_server.address) as connected:
        yield connected


def watermarked(mark: int, *shape: int) -> Array:
    """Return an input that no other mark's input resembles in any row."""
    return noise(*shape, seed=mark) + np.float32(mark)


def mixed_call(chance: random.Random, mark: int) -> tuple[str, Array, list[str | trocar.Tap]]:
    """Return a model, an input that carries the mark, and taps."""
    batch = chance.randint(1, 4)
    kind = chance.randrange(4)
    if kind == 0:
        taps: list[str | trocar.Tap] = [
            *chance.sample(["conv", "relu@0", "relu@1", "conv2", "pool"], 2),
            "/in",
            "fc",
        ]
        return "plain", watermarked(mark, batch, 3, 8, 8), taps
    if kind == 1:
        return "structured", watermarked(mark, batch, 3), ["both", "split/in", '/out["out"]', "/in"]
    if kind == 2:
        return (
            "dependent",
            watermarked(mark, batch, 3),
            ["first", trocar.tap("late", stats=["mean", "std"]), "/in"],
        )
    return "identity", watermarked(mark, batch, 3), ["/in", "identity", "/out"]


def equal(one: trocar.FeatureMaps, other: trocar.FeatureMaps) -> bool:
    same_stats = all(one.stats[name] == other.stats[name] for name in one.stats)
    return (
        list(one) == list(other)
        and same_stats
        and all(np.array_equal(one[name], other[name]) for name in one)
    )


def test_calls_of_many_clients_never_mix(busy_server: RunningServer, busy_client: trocar.Client) -> None:
    """480 mixed calls: every row of every reply is its own, and each reply equals that of a solo run."""
    calls = {mark: mixed_call(random.Random(mark), mark) for mark in range(CLIENTS * CALLS_PER_CLIENT)}
    hooks = hook_counts(busy_server)

    def run(number: int) -> dict[int, trocar.FeatureMaps]:
        with trocar.connect(busy_server.address) as own:
            marks = range(number * CALLS_PER_CLIENT, (number + 1) * CALLS_PER_CLIENT)
            return {mark: own.extract(*calls[mark]) for mark in marks}

    with ThreadPoolExecutor(CLIENTS) as threads:
        replies = {mark: maps for done in threads.map(run, range(CLIENTS)) for mark, maps in done.items()}
    foreign = [mark for mark, maps in replies.items() if not np.array_equal(maps["/in"], calls[mark][1])]
    different = [mark for mark, maps in replies.items() if not equal(maps, busy_client.extract(*calls[mark]))]
    assert (foreign, different) == ([], [])
    assert hook_counts(busy_server) == hooks


def failing_call(client: trocar.Client, chance: random.Random) -> None:
    images = noise(2, 3, 8, 8)
    calls: list[Callable[[], object]] = [
        lambda: client.extract("plain", images[:, :2], taps="fc"),
        lambda: client.extract("plain", images, taps="unused"),
        lambda: client.extract("plain", images, taps=["fc", "nowhere"]),
        lambda: client.extract(
            "plain", images, taps=trocar.tap("fc", stats=["mean"], over="channel", channel_dim=9)
        ),
        lambda: client.extract("plain", images.astype(np.int32), taps=["conv", "fc"]),
        lambda: client.extract("dependent", -np.ones((1, 3), np.float32), taps="late"),
        lambda: client.extract("structured", {"bias": images}, taps="both"),
    ]
    with pytest.raises(trocar.TrocarError):
        chance.choice(calls)()


def test_nothing_is_left_of_three_hundred_calls_of_which_a_third_fail(
    busy_server: RunningServer, busy_client: trocar.Client
) -> None:
    chance = random.Random(1)

    def calls(count: int) -> None:
        for mark in range(count):
            if chance.random() < 0.3:
                failing_call(busy_client, chance)
            else:
                busy_client.extract(*mixed_call(chance, mark))

    calls(100)
    hooks, tensors = hook_counts(busy_server), live_tensor_count()
    calls(300)
    assert hook_counts(busy_server) == hooks
    assert live_tensor_count() <= tensors + 20  # of 90 failed calls


def test_weights_are_the_same_after_many_calls(
    busy_server: RunningServer, busy_client: trocar.Client
) -> None:
    module = busy_server.engine.deployment("plain").hosted.module
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for mark in range(50):
        busy_client.extract("plain", watermarked(mark, 2, 3, 8, 8), taps=["conv", "relu@1", "fc"])
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_a_pass_of_one_request_does_not_see_the_taps_of_another(
    busy_server: RunningServer, busy_client: trocar.Client
) -> None:
    """Concurrent calls for different modules: each reply has its own names and no more."""
    images = noise(2, 3, 8, 8)
    selectors = ["conv", "conv2", "pool", "fc", "relu@0", "relu@1"] * 10
    with ThreadPoolExecutor(CLIENTS) as threads:
        replies = list(
            threads.map(lambda tap: list(busy_client.extract("plain", images, taps=tap)), selectors)
        )
    assert replies == [[selector] for selector in selectors]


def test_values_of_a_failed_pass_are_gone_when_the_error_is_sent(serve: Serve) -> None:
    """Without waiting for Python's garbage collector, which knows nothing of a device's memory."""
    running = serve(models={"m": custom(FailsLate)})
    with trocar.connect(running.address) as connected:
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                with pytest.raises(trocar.errors.InputRejectedError):
                    connected.extract("m", noise(2, 3), taps="/out")
            connected.extract("m", noise(1, 3), taps="/out")
            running.run(lambda: asyncio.sleep(0))
            assert len(FailsLate.alive) <= 1
        finally:
            gc.enable()


@pytest.mark.parametrize(
    "refused",
    [
        {"data": noise(2, 2, 8, 8), "taps": "fc"},
        {"data": noise(2, 3, 8, 8).astype(np.int32), "taps": ["conv", "fc"]},
        {"data": noise(2, 3, 8, 8), "taps": trocar.tap("fc", stats=["mean"], over="channel", channel_dim=9)},
    ],
    ids=["shape", "dtype", "statistic"],
)
def test_inputs_of_a_refused_call_are_gone_when_the_error_is_sent(
    busy_server: RunningServer, busy_client: trocar.Client, refused: dict[str, Any]
) -> None:
    """Without waiting for Python's garbage collector: no error holds the frames that it came through."""
    busy_server.run(lambda: asyncio.sleep(0))
    before = live_tensor_count()
    gc.disable()
    try:
        for _ in range(5):
            with pytest.raises(trocar.TrocarError):
                busy_client.extract("plain", refused["data"], taps=refused["taps"])
        busy_server.run(lambda: asyncio.sleep(0))
        assert tensor_count() <= before + 1
    finally:
        gc.enable()


def test_values_of_a_reply_are_gone_when_it_is_sent(
    busy_server: RunningServer, busy_client: trocar.Client
) -> None:
    images = noise(2, 3, 8, 8)
    busy_client.extract("plain", images, taps="**")
    before = live_tensor_count()
    for _ in range(5):
        busy_client.extract("plain", images, taps="**")
    wait_until(lambda: live_tensor_count() <= before + 1)  # the last reply arrives before it is let go of


def test_a_models_own_state_does_not_leak_into_a_reply_that_was_computed_before(serve: Serve) -> None:
    """Three calls to a model that adds to a buffer and returns it: each starts from the buffer as loaded."""
    running = serve(models={"m": custom(KeepsState, (4,))})
    with trocar.connect(running.address) as connected:
        totals = [connected.extract("m", np.ones((1, 4), np.float32), taps="/out")["/out"] for _ in range(3)]
    with torch.no_grad():
        expected = rebuilt(KeepsState)(torch.ones(1, 4)).numpy()
    assert all(np.array_equal(total, expected) for total in totals)


def test_the_model_of_a_server_is_the_one_that_anybody_can_rebuild(busy_client: trocar.Client) -> None:
    images = noise(2, 3, 8, 8)
    with torch.inference_mode():
        expected = rebuilt(Plain)(torch.from_numpy(images)).numpy()
    assert np.array_equal(busy_client.extract("plain", images, taps="fc")["fc"], expected)
