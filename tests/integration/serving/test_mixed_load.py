"""Plain passes, starts in the middle, nodes and functions at once: no reply has anything of another."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import trocar
from tests.support.models.odd_models import Transformer
from tests.support.models.tiny_models import Plain
from tests.support.oracles.oracle import Array, noise
from tests.support.servers.footprint import hook_counts, live_tensor_count
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom

CLIENTS, CALLS = 8, 25
WAIT_S = 60


@pytest.fixture(scope="module", params=[1, 3])
def loaded(request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    models: dict[str, Any] = {
        "plain": custom(Plain, (3, 8, 8), replicas=request.param),
        "transformer": custom(Transformer, (5, 16), replicas=request.param),
    }
    with running_server(models=models, device="cpu", limits={"max_queue": 1000}) as running:
        yield running


def watermarked(mark: int, *shape: int) -> Array:
    return noise(*shape, seed=mark) + np.float32(mark)


def call_of(mark: int) -> tuple[str, Array, list[Any], str | None]:
    """Return a model, an input that carries the mark, taps, and where to start."""
    chance = random.Random(mark)
    batch, kind = chance.randint(1, 3), chance.randrange(6)
    images, tokens = watermarked(mark, batch, 3, 8, 8), watermarked(mark, batch, 5, 16)
    features = watermarked(mark, batch, 4, 8, 8)
    calls: list[tuple[str, Array, list[Any], str | None]] = [
        ("plain", images, ["/in", "conv", "relu@1", "fc"], None),
        ("plain", images, ["/in", "fx:conv2", "fx:fc", "fc"], None),
        ("plain", features, ["fc", "pool", "relu@1"], "conv2"),
        ("plain", features, [trocar.tap("fc", stats=["mean"], cast="float16")], "conv"),
        ("transformer", tokens, ["/in", "fn:linear@-1", "/out"], None),
        ("transformer", tokens, ["/in", trocar.tap("encoder", reduce=[trocar.pool("avg")]), "head"], None),
    ]
    return calls[kind]


def run(client: trocar.Client, mark: int) -> trocar.FeatureMaps:
    model_id, values, taps, start = call_of(mark)
    return client.extract(model_id, values, taps, start_at=start)


def equal(one: trocar.FeatureMaps, other: trocar.FeatureMaps) -> bool:
    return list(one) == list(other) and all(np.array_equal(one[name], other[name]) for name in one)


def test_replies_are_those_of_solo_runs(loaded: RunningServer) -> None:
    hooks = hook_counts(loaded)

    def runs(number: int) -> dict[int, trocar.FeatureMaps]:
        with trocar.connect(loaded.address, timeout_s=120) as own:
            return {mark: run(own, mark) for mark in range(number * CALLS, (number + 1) * CALLS)}

    with ThreadPoolExecutor(CLIENTS) as threads:
        replies = {mark: maps for done in threads.map(runs, range(CLIENTS)) for mark, maps in done.items()}
    with trocar.connect(loaded.address) as alone:
        different = [mark for mark, maps in replies.items() if not equal(maps, run(alone, mark))]
    foreign = [
        mark
        for mark, maps in replies.items()
        if "/in" in maps and not np.array_equal(maps["/in"], call_of(mark)[1])
    ]
    assert (foreign, different) == ([], [])
    assert hook_counts(loaded) == hooks


def test_three_hundred_batches_of_a_stream_leave_no_tensor(loaded: RunningServer) -> None:
    """The long version, with the memory of both processes, is `tests.sweeps.stream_memory`."""
    taps: list[Any] = [
        trocar.tap("conv2", stats=["mean", "covariance", "kurtosis"], over="channel"),
        trocar.tap("fc", stats=["mean", trocar.quantiles(0.5), trocar.histogram(bins=8)], values=False),
    ]
    counts = []
    counted = {index: threading.Event() for index in (60, 180)}

    def batches() -> Iterator[Array]:
        """Yield batches; behind those after which tensors are counted, wait: nothing is in flight then."""
        for index in range(300):
            yield noise(2, 3, 8, 8, seed=index)
            if index in counted:
                counted[index].wait(WAIT_S)

    with (
        trocar.connect(loaded.address) as client,
        client.extract_stream("plain", batches(), taps, running_statistics=True) as stream,
    ):
        for result in stream:
            result.unwrap()
            if result.index in (60, 180, 299):
                counts.append(live_tensor_count())
                if result.index in counted:
                    counted[result.index].set()
    assert counts[2] - min(counts[:2]) <= 60, counts  # fewer is what other tests have left behind
