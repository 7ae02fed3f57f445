"""A server all of whose copies are late answers as one without: who reads a reply waits for its bytes."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import trocar
from tests.integration.extraction.test_plan_equals_reality import INPUTS, tap
from tests.integration.streams.test_stream_equals_calls import outcome, same
from tests.support.models.tiny_models import Plain
from tests.support.oracles.oracle import noise
from tests.support.oracles.transfer_devices import LateBackend, late_transfers
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom
from trocar_server.app import assembly

IMAGES = noise(4, 3, 8, 8)
MODELS = {
    "plain": custom(Plain, (3, 8, 8)),
    **{
        name: custom(kind, (values["x"] if isinstance(values, dict) else values).shape[1:])
        for name, (kind, values) in INPUTS.items()
    },
}
SETTINGS: dict[str, Any] = {"models": MODELS, "device": "cpu", "limits": {"feature_cache_bytes": 1 << 20}}


@pytest.fixture(scope="module")
def backend() -> LateBackend:
    return LateBackend()


@pytest.fixture(scope="module")
def late_server(backend: LateBackend) -> Iterator[RunningServer]:
    """One with little page-locked memory, so that some replies find none."""
    open_late = patch.object(assembly, "transfers_of", lambda *_, **__: late_transfers(backend, 1 << 20))
    with open_late, running_server(**SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def late(late_server: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(late_server.address) as connected:
        yield connected


@pytest.fixture(scope="module")
def plain() -> Iterator[trocar.Client]:
    with running_server(**SETTINGS) as running, trocar.connect(running.address) as connected:
        yield connected


@pytest.mark.parametrize("model_id", INPUTS)
def test_any_taps_give_the_same_bits(late: trocar.Client, plain: trocar.Client, model_id: str) -> None:
    chance, values = random.Random(model_id), INPUTS[model_id][1]
    for _ in range(25):
        try:
            taps = [tap(chance, model_id) for _ in range(chance.choice([1, 1, 2]))]
        except ValueError:
            continue
        found, expected = (outcome(lambda: one.extract(model_id, values, taps)) for one in (late, plain))  # noqa: B023
        if isinstance(expected, trocar.TrocarError):
            assert (type(found), str(found)) == (type(expected), str(expected))
        else:
            assert same(found, expected)


def test_copies_were_late(backend: LateBackend, late: trocar.Client) -> None:
    before = backend.begun_count, backend.upload_count
    late.extract("plain", IMAGES, "conv", options=trocar.options(cache=False))
    assert (backend.begun_count, backend.upload_count) == (before[0] + 1, before[1] + 1)


def test_streams_give_the_same_bits(late: trocar.Client, plain: trocar.Client) -> None:
    taps = [trocar.tap("conv", stats=["mean", "max"]), trocar.tap("relu@0", cast="int8"), trocar.tap("fc/in")]
    batches = [noise(rows, 3, 8, 8) for rows in range(1, 9)]
    found, expected = (list(one.extract_stream("plain", batches, taps)) for one in (late, plain))
    assert len(found) == len(batches)
    assert all(same(one.unwrap(), other.unwrap()) for one, other in zip(found, expected, strict=True))


def test_a_kept_reply_is_the_one_that_came(late: trocar.Client) -> None:
    first = late.extract("plain", IMAGES, ["conv", "fc"])
    again = late.extract("plain", IMAGES, ["conv", "fc"])
    assert again.execution.is_cached
    assert same(again, first)


def test_gradients_and_edits_give_the_same_bits(late: trocar.Client, plain: trocar.Client) -> None:
    edits = [trocar.edit("conv", "scale", 0.5)]
    found, expected = (
        one.gradients("plain", IMAGES, of=trocar.logit(1), at=["conv", "/in"], edits=edits)
        for one in (late, plain)
    )
    assert all(found[name].tobytes() == expected[name].tobytes() for name in expected)


def test_many_at_once_get_each_their_own(late_server: RunningServer, plain: trocar.Client) -> None:
    expected = [plain.extract("plain", np.full_like(IMAGES, number), "conv")["conv"] for number in range(16)]

    def ask(number: int) -> bool:
        with trocar.connect(late_server.address) as client:
            return all(
                np.array_equal(
                    client.extract(
                        "plain", np.full_like(IMAGES, number), "conv", options=trocar.options(cache=False)
                    )["conv"],
                    expected[number],
                )
                for _ in range(10)
            )

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(16)))
