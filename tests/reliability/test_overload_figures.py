"""`python -m benchmarks.overload`: every call and health check counts. Its figures need a quiet machine."""

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.health_probe import HealthProbe
from benchmarks.overload import Call, Measured, Outcome, measure
from tests.support.models.tiny_models import Plain
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom

CALL = Call("plain", np.zeros((1, 3, 8, 8), np.float32), "fc", 2.0)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    models = {"plain": custom(Plain, (3, 8, 8))}
    with running_server(models=models, device="cpu", limits={"max_queue": 4}) as running:
        yield running


def test_every_call_is_counted_once(server: RunningServer) -> None:
    found = asyncio.run(measure(server.address, CALL, 0.3, [0.5, 3.0]))
    for outcome in found.outcomes:
        assert outcome.sent == len(outcome.lags) == int(outcome.factor * found.capacity * 0.3)
        assert min(outcome.lags) >= 0
        assert outcome.health
    assert found.idle_health
    assert found.peak >= max(found.capacity, *(outcome.goodput for outcome in found.outcomes))


def test_health_checks_come_at_fixed_times_from_another_process(server: RunningServer) -> None:
    with HealthProbe(server.address) as probe:
        assert probe.seconds == []
    assert probe.seconds
    assert min(probe.seconds) > 0


def test_a_promise_is_kept_by_goodput_and_health_together() -> None:
    good = Outcome(3.0, 10.0, accepted=[0.1] * 95, health=[0.01] * 99 + [0.06])
    assert not good.keeps_promise(10.0)
    good.health += [0.01] * 100
    assert good.keeps_promise(10.0)
    assert not good.keeps_promise(13.0)
    assert Measured(8.0, [], [good]).peak == 9.5
    assert good.row(9.5).startswith("| 3.0 | 95 | 9.5 | 100% | 100.0 | 100.0 | 0 |")
