"""The memory that a plan tells is what the allocator then sees, within bounds."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import trocar
from tests.support.oracle import noise
from tests.support.running_server import RunningServer, running_server
from trocar._requests import Start, extract_call
from trocar_api.v1 import extraction_pb2 as pb
from trocar_server.engine.plan import Payloads
from trocar_server.engine.work import Prepared, run_plan
from trocar_server.rpc.requests import to_plan
from trocar_server.surgery import PassGuard

SHAPE = (2, 3, 224, 224)
TAPS: dict[str, list[Any]] = {
    "output": ["/out"],
    "several": ["#3:9", "/out"],
    "statistics": [trocar.tap("#5", stats=["mean", "kurtosis"], values=False)],
    "quantiles": [trocar.tap("#4", stats=[trocar.quantiles(0.5), trocar.histogram(bins=8)], values=False)],
    "covariance": [trocar.tap("#5", stats=["covariance"], over="channel", values=False)],
    "casts": [trocar.tap("#2:6", cast="float16")],
    "pools": [trocar.tap("#2:6", reduce=[trocar.pool("avg")])],
}


@pytest.fixture(scope="module")
def models() -> Iterator[RunningServer]:
    hosted = {name: {"weights": "random:0"} for name in ("resnet18", "shufflenet_v2_x0_5")}
    with running_server(models=hosted, device="cpu", threads=2) as running:
        yield running


def allocated_at_most(work: Callable[[], Any]) -> int:
    """Return the most bytes that torch's allocator has given out at a time, as its profiler tells."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        work()
    profiler: Any = profile.profiler  # without types for what it tells
    events = profiler.kineto_results.events()
    changes = sorted((event for event in events if event.name() == "[memory]"), key=lambda e: e.start_ns())
    return int(max(np.cumsum([change.nbytes() for change in changes])))


@pytest.mark.parametrize("model_id", ["resnet18", "shufflenet_v2_x0_5"])
@pytest.mark.parametrize("name", TAPS)
def test_the_memory_told_is_the_memory_taken(models: RunningServer, model_id: str, name: str) -> None:
    images = noise(*SHAPE)
    with trocar.connect(models.address) as client:
        told = client.plan(model_id, SHAPE, TAPS[name]).memory_bytes
    call = extract_call(model_id, images, TAPS[name], None, Start(None, None))
    plan, _ = to_plan(pb.ExtractRequest.FromString(next(iter(call.messages()))), models.engine.limits)
    host = models.engine._hosts[model_id]

    def work() -> None:
        prepared = Prepared(plan, Payloads([images.reshape(-1).view(np.uint8).copy()]), [[]])
        run_plan(host, host.pool._free[0], prepared, PassGuard(), models.engine.limits)

    models.on_owner(work)  # what torch allocates once and for all
    taken = models.on_owner(lambda: allocated_at_most(work)) + images.nbytes
    assert 0.95 * taken <= told <= 2.1 * taken
