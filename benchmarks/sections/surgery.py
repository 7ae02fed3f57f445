"""Surgery: the cost of edits and gradients.

Edits against the same request without them, gradients against autograd in the caller's own process. Each
row alternates the two variants in rounds and prints the ratio of the medians.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection

import numpy as np

import trocar
from benchmarks.measuring import Effort, images, in_turns, ratio, timed
from benchmarks.report import Row, Table, row
from benchmarks.served import served

_ROUNDS = 5
_REPEATS = 2


def _own_gradients(pipe: Connection) -> None:
    """Reply with the seconds of a forward and backward pass in plain torch."""
    import torch
    from torchvision.models import get_model

    torch.manual_seed(0)
    models = {name: get_model(name, weights=None).eval().requires_grad_(False) for name in _MODELS}
    while (job := pipe.recv()) is not None:
        name, shape, path = job
        batch = torch.from_numpy(np.random.default_rng(0).standard_normal(shape, np.float32))
        seconds = []
        for _ in range(_REPEATS):
            started = time.perf_counter()
            _backward(models[name], batch, path)
            seconds.append(time.perf_counter() - started)
        pipe.send(seconds)


def _backward(model: object, batch: object, path: str) -> None:
    import torch

    assert isinstance(model, torch.nn.Module)
    assert isinstance(batch, torch.Tensor)
    result = []
    module = model.get_submodule(path)

    def begin(_: torch.nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
        result.append(output.detach().requires_grad_())
        return result[0].clone()

    with ExitStack() as hooks:
        if path:
            hooks.callback(module.register_forward_hook(begin).remove)
        else:
            batch = batch.clone().requires_grad_()
            result.append(batch)
        score = model(batch)[:, 207].sum()
    torch.autograd.grad(score, result[0])


_MODELS = ("resnet18", "resnet50")


def run(effort: Effort) -> list[Table]:
    """Measure all rows."""
    one = [trocar.edit("layer3", "scale", 0.5)]
    part = [trocar.edit("layer3", "zero", channels=[1, 2])]
    all_relus = [trocar.edit("**:ReLU", "scale", 0.99)]
    rounds = effort.of(_ROUNDS)
    with (
        own_process() as own,
        served([f"{name}=random:0" for name in _MODELS]) as server,
        trocar.connect(server.address, timeout_s=600) as client,
    ):
        edits = [
            edit_cost(client, "resnet18", 1, one, "one edit", rounds),
            edit_cost(client, "resnet50", 8, one, "one edit", rounds),
            edit_cost(client, "resnet50", 8, part, "an edit of two channels", rounds),
            edit_cost(client, "resnet50", 8, all_relus, "an edit of all 49 ReLUs", rounds, target=None),
            patching_cost(client, "resnet50", 8, rounds),
        ]
        gradients = [
            gradient_cost(client, own, "resnet18", 1, "", rounds),
            gradient_cost(client, own, "resnet50", 8, "", rounds),
            gradient_cost(client, own, "resnet50", 8, "layer4", rounds),
            health_cost(client, rounds),
        ]
    return [
        Table("Edits", edits, note="Time against the same request without them."),
        Table("Gradients", gradients, note="Time against a backward pass in a process of the caller's own."),
    ]


def edit_cost(
    client: trocar.Client,
    model: str,
    batch: int,
    edits: list[trocar.Edit],
    note: str,
    rounds: int,
    target: float | None = 1.05,
) -> Row:
    """Compare a request with edits with the same one without."""
    plain = partial(client.extract, model, images(batch), ["fc"])
    value = ratio(partial(plain, edits=edits), plain, rounds, _REPEATS)
    return row(f"{model}, batch {batch}, `fc`: with {note}, against without", value, target)


def patching_cost(client: trocar.Client, model: str, batch: int, rounds: int) -> Row:
    """Compare activation patching in one call with two plain calls."""
    inputs = images(batch)
    swap = trocar.edit("layer2", "swap", source="other")

    def plain() -> None:
        client.extract(model, inputs, ["layer2"])
        client.extract(model, inputs, ["fc"])

    def patched() -> None:
        client.extract(model, inputs, ["fc"], edits=[swap], sources={"other": inputs})

    value = ratio(patched, plain, rounds, _REPEATS)
    return row(f"{model}, batch {batch}: activation patching in one call, against two calls", value, 1.05)


Own = Callable[[str, tuple[int, ...], str], list[float]]
"""Returns the seconds of local passes, by model, shape and module."""


def gradient_cost(client: trocar.Client, own: Own, model: str, batch: int, path: str, rounds: int) -> Row:
    """Compare gradients at one place with autograd in the caller's own process."""
    inputs = images(batch)
    ours = partial(client.gradients, model, inputs, of=trocar.logit(207), at=path or "/in")
    ways = {"ours": partial(timed, ours, _REPEATS), "own": partial(own, model, inputs.shape, path)}
    result = in_turns(ways, rounds)
    value = statistics.median(result["ours"]) / statistics.median(result["own"])
    return row(f"{model}, batch {batch}, gradient at `{path or '/in'}`, against a local backward", value)


def health_cost(client: trocar.Client, rounds: int) -> Row:
    """Compare a health report of every module with the gradient at the input alone."""
    inputs = images(8)
    value = ratio(
        partial(client.health, "resnet50", inputs, trocar.logit(207)),
        partial(client.gradients, "resnet50", inputs, of=trocar.logit(207), at="/in"),
        rounds,
        _REPEATS,
    )
    return row("resnet50, batch 8, health of every module, against the gradient at `/in`", value)


@contextmanager
def own_process() -> Iterator[Own]:
    """Run local passes in a separate process; yield a function that requests one."""
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    process = context.Process(target=_own_gradients, args=(child,), daemon=True)
    process.start()

    def own(model: str, shape: tuple[int, ...], path: str) -> list[float]:
        pipe.send((model, shape, path))
        seconds: list[float] = pipe.recv()
        return seconds

    try:
        yield own
    finally:
        pipe.send(None)
        process.join()
