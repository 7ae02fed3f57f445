"""A pass for which a GPU has no memory: once more with an empty cache, and no more often."""

import numpy as np
import pytest

import trocar
from tests.support.models.overload_models import Hungry, Memory
from tests.support.oracles.oracle import Array
from tests.support.servers.running_server import RunningServer
from tests.support.servers.serving import Serve, custom
from trocar_server.engine.run import runner
from trocar_server.engine.schedule import device

ROW = np.ones((1, 3), np.float32)


@pytest.fixture
def emptied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the CPU pass for a GPU, and note when its cache is given back."""
    times: list[str] = []
    monkeypatch.setattr(runner, "keeps_memory", lambda _: True)
    monkeypatch.setattr(runner, "give_back_cache", lambda _: times.append("between"))
    monkeypatch.setattr(device, "give_back_cache", lambda _: times.append("after"))
    return times


@pytest.fixture
def hungry(serve: Serve) -> RunningServer:
    return serve(models={"hungry": custom(Hungry)})


def extracted(server: RunningServer, failures: int) -> Array:
    with trocar.connect(server.address) as client:
        client.extract("hungry", ROW, "last")
        Memory.failures = failures
        return np.asarray(client.extract("hungry", ROW, "last")["last"])


def test_a_pass_runs_once_more_with_an_empty_cache(hungry: RunningServer, emptied: list[str]) -> None:
    assert np.array_equal(extracted(hungry, failures=1), extracted(hungry, failures=0))
    assert emptied == ["between"]


def test_a_pass_that_finds_no_memory_twice_fails(hungry: RunningServer, emptied: list[str]) -> None:
    with pytest.raises(trocar.errors.ServerOutOfMemoryError):
        extracted(hungry, failures=2)
    assert emptied == ["between", "after"]
    assert extracted(hungry, failures=0).shape == (1, 3)


def test_on_a_cpu_nothing_is_tried_again(hungry: RunningServer) -> None:
    with pytest.raises(trocar.errors.ServerOutOfMemoryError):
        extracted(hungry, failures=1)
    assert Memory.failures == 0
