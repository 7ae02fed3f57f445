"""The memory that a plan tells is what the allocator then sees, within bounds."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import trocar
from tests.support.oracles.oracle import Array, noise
from tests.support.servers.footprint import replicas
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import Serve
from trocar._request.objectives import Objective
from trocar._request.surgery import make_surgery
from trocar._wire.requests import ExtractCall, Start, extract_call, gradient_taps
from trocar_api.v1 import extraction_pb2 as pb
from trocar_server.engine.execute.eager import Eager
from trocar_server.engine.host.checked_plan import CheckedPlan
from trocar_server.engine.request.plan import Payloads
from trocar_server.engine.run.bound_call import Prepared
from trocar_server.engine.run.runner import PassCall, run_call
from trocar_server.rpc.codec.extract_requests import to_plan
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


@pytest.fixture(scope="module")
def with_gradients() -> Iterator[RunningServer]:
    hosted = {name: {"weights": "random:0"} for name in ("resnet18", "vit_b_16", "densenet121")}
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
    taken = bytes_taken(models, model_id, images, call)
    assert 0.95 * taken <= told <= 2.1 * taken


def bytes_taken(models: RunningServer, model_id: str, images: Array, call: ExtractCall) -> int:
    """Return the most bytes that a request held at a time, inputs included."""
    plan, _ = to_plan(pb.ExtractRequest.FromString(next(iter(call.messages()))), models.engine.limits)
    deployment = models.engine.deployment(model_id)

    def work() -> None:
        checked = CheckedPlan(plan, deployment, models.engine.limits)
        prepared = Prepared(checked, Payloads([images.reshape(-1).view(np.uint8).copy()]), [[]])
        run_call(Eager(deployment.pool.free[0]), PassCall(prepared, PassGuard(), time.perf_counter()))

    models.on_owner(work)  # what torch allocates once and for all
    return models.on_owner(lambda: allocated_at_most(work)) + images.nbytes


GRADIENTS: dict[str, tuple[Objective, list[Any], list[trocar.Edit]]] = {
    "input": (trocar.logit(7), ["/in"], []),
    "late": (trocar.logit(7), ["#-4"], []),
    "parameters": (trocar.logit(7), [trocar.tap("**/param(*)", stats="l2", values=False)], []),
    "edited": (
        trocar.probability(7),
        ["/in"],
        [trocar.edit("#5", "noise", 1.0), trocar.edit("#7/grad_out", "clamp", low=0)],
    ),
    "second order": (trocar.gradient_penalty(trocar.logit(7)), ["#-4"], []),
}


@pytest.mark.parametrize("model_id", ["resnet18", "vit_b_16", "densenet121"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_the_memory_of_gradients_told_is_the_memory_taken(
    with_gradients: RunningServer, model_id: str, name: str
) -> None:
    images = noise(1, *SHAPE[1:])
    objective, at, edits = GRADIENTS[name]
    taps = gradient_taps(at, ())
    with trocar.connect(with_gradients.address) as client:
        told = client.plan(model_id, images, taps, of=objective, edits=edits).memory_bytes
    call = extract_call(model_id, images, taps, None, surgery=make_surgery(edits, objective, None))
    taken = bytes_taken(with_gradients, model_id, images, call)
    assert 0.9 * taken <= told <= 2.2 * taken


def test_the_memory_of_gradients_of_a_model_that_looks_at_its_data(serve: Serve) -> None:
    """No pass without data can tell; a guess from what modules return is told."""
    model_id = "ssdlite320_mobilenet_v3_large"
    running = serve(models={model_id: {"weights": "random:0", "input_shape": (3, 96, 96)}})
    images, taps = noise(1, 3, 96, 96), gradient_taps(["/in"], ())
    objective = trocar.value("head.classification_head", function="square")
    with trocar.connect(running.address) as client:
        told = client.plan(model_id, images, taps, of=objective).memory_bytes
    call = extract_call(model_id, images, taps, None, surgery=make_surgery((), objective, None))
    taken = bytes_taken(running, model_id, images, call)
    assert 0.9 * taken <= told <= 2.2 * taken


def test_a_gradient_pass_that_is_too_large_is_refused_before_anything_is_computed(serve: Serve) -> None:
    """The forward pass alone would fit."""
    limit = 60 << 20
    running = serve(models={"resnet18": {"weights": "random:0"}}, limits={"max_pass_bytes": limit})
    images = noise(4, *SHAPE[1:])
    with trocar.connect(running.address) as client:
        assert client.plan("resnet18", images, "/out").memory_bytes < limit
        client.extract("resnet18", images, "/out")
        replica = replicas(running, "resnet18")[0]
        passes: list[int] = []
        handle = replica.register_forward_pre_hook(lambda *_: passes.append(1))
        for call in (
            lambda: client.gradients("resnet18", images, of=trocar.logit(1), at="/in"),
            lambda: client.plan("resnet18", images, "/grad_in", of=trocar.logit(1)),
        ):
            with pytest.raises(trocar.errors.PassTooLargeError):
                call()
        assert not passes
        client.gradients("resnet18", images, of=trocar.logit(1), at="layer4")
        handle.remove()
    assert passes
