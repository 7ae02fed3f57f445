"""A server with a catalogue, for the tests of `ModelService`, and one with narrow limits for bad input."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import trocar
from tests.support.models.tiny_models import Count, DataDependent, Plain, Structured
from tests.support.oracles.oracle import noise
from tests.support.servers.footprint import hook_counts
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom

IMAGES = noise(2, 3, 8, 8)
NARROW_LIMITS = {"max_request_bytes": 1 << 20, "max_reply_bytes": 1 << 16, "max_batch": 16, "max_taps": 8}


@pytest.fixture(scope="module")
def catalogue_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models: dict[str, Any] = {
        "plain": custom(Plain, (3, 8, 8)),
        "structured": custom(Structured),
        "dependent": custom(DataDependent),
        "labelled": custom(Plain, (3, 8, 8), categories=("a", "b", "c", "d", "e")),
        "resnet18": {"weights": "random:0"},
    }
    data_dir = tmp_path_factory.mktemp("data")
    with running_server(models=models, device="cpu", data_dir=data_dir) as running:
        yield running


@pytest.fixture(scope="module")
def models_client(catalogue_server: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(catalogue_server.address) as connected:
        yield connected


@pytest.fixture(scope="module")
def small_server() -> Iterator[RunningServer]:
    """A server with narrow limits."""
    models: dict[str, Any] = {
        "plain": custom(Plain, (3, 8, 8)),
        "structured": custom(Structured),
        "counts": custom(Count),
        "resnet18": {"weights": "random:0"},
        "sleeping": custom(Plain, (3, 8, 8)),
    }
    with running_server(models=models, device="cpu", limits=NARROW_LIMITS) as running:
        running.run(lambda: running.engine.deployments.unload("sleeping"))
        yield running


@pytest.fixture(scope="module")
def healthy(small_server: RunningServer) -> Iterator[trocar.Client]:
    """A client that has made one good call, so that whatever is kept for later is there."""
    with trocar.connect(small_server.address) as connected:
        connected.extract("plain", IMAGES, taps="fc")
        yield connected


@pytest.fixture
def unharmed(small_server: RunningServer, healthy: trocar.Client) -> Iterator[None]:
    """Whatever a test does: the next call is answered as before, no hook and no lease is left."""
    expected = healthy.extract("plain", IMAGES, taps="fc")["fc"]
    hooks = hook_counts(small_server)
    yield
    assert np.array_equal(healthy.extract("plain", IMAGES, taps="fc")["fc"], expected)
    assert hook_counts(small_server) == hooks
