"""What edits and gradients cost: `python -m benchmarks.surgery`.

Edits against the same request without them, gradients against autograd in a process of the caller's own. Each
row alternates the two ways in rounds and prints the ratio of the medians.
"""

import multiprocessing
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np

import trocar
from benchmarks.report import Row, print_rows
from benchmarks.served import served

_ROUNDS = 5
_REPEATS = 2


def _own_gradients(pipe: Connection) -> None:
    """Answer with the seconds of a forward and backward pass, as somebody without us would run it."""
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
        pipe.send(min(seconds))


def _backward(model: object, batch: object, path: str) -> None:
    import torch

    assert isinstance(model, torch.nn.Module)
    assert isinstance(batch, torch.Tensor)
    found = []
    module = model.get_submodule(path)

    def begin(_: torch.nn.Module, __: object, output: torch.Tensor) -> torch.Tensor:
        found.append(output.detach().requires_grad_())
        return found[0].clone()

    with ExitStack() as hooks:
        if path:
            hooks.callback(module.register_forward_hook(begin).remove)
        else:
            batch = batch.clone().requires_grad_()
            found.append(batch)
        score = model(batch)[:, 207].sum()
    torch.autograd.grad(score, found[0])


_MODELS = ("resnet18", "resnet50")


def edit_cost(
    client: trocar.Client, model: str, shape: tuple[int, ...], edits: list[trocar.Edit], note: str
) -> Row:
    """Compare a request with edits with the same one without."""
    images = np.random.default_rng(0).standard_normal(shape, np.float32)

    def plain() -> None:
        client.extract(model, images, ["fc"])

    def edited() -> None:
        client.extract(model, images, ["fc"], edits=edits)

    return Row(f"{model}, batch {shape[0]}, `fc`: {note}", _ratio(edited, plain), 1.05)


def patching_cost(client: trocar.Client, model: str, shape: tuple[int, ...]) -> Row:
    """Compare activation patching in one call with two plain calls."""
    images = np.random.default_rng(0).standard_normal(shape, np.float32)
    swap = trocar.edit("layer2", "swap", source="other")

    def plain() -> None:
        client.extract(model, images, ["layer2"])
        client.extract(model, images, ["fc"])

    def patched() -> None:
        client.extract(model, images, ["fc"], edits=[swap], sources={"other": images})

    note = "swap from a source, against two calls"
    return Row(f"{model}, batch {shape[0]}, {note}", _ratio(patched, plain), 1.05)


Own = Callable[[str, tuple[int, ...], str], float]
"""Returns the seconds of a local pass, by model, shape and module."""


def gradient_cost(client: trocar.Client, own: Own, model: str, batch: int, path: str) -> Row:
    """Compare gradients at one place with autograd in the caller's own process."""
    shape = (batch, 3, 224, 224)
    images = np.random.default_rng(0).standard_normal(shape, np.float32)

    def ours() -> None:
        client.gradients(model, images, of=trocar.logit(207), at=path or "/in")

    ours()
    own(model, shape, path)
    pairs = [(_seconds(ours), own(model, shape, path)) for _ in range(_ROUNDS)]
    ratio = statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)
    return Row(f"{model}, batch {batch}, gradient at `{path or '/in'}`, against a local backward", ratio)


def health_cost(client: trocar.Client) -> Row:
    """Compare a health report of every module with the gradient at the input alone."""
    images = np.random.default_rng(0).standard_normal((8, 3, 224, 224), np.float32)

    def report() -> None:
        client.health("resnet50", images, trocar.logit(207))

    def plain() -> None:
        client.gradients("resnet50", images, of=trocar.logit(207), at="/in")

    note = "health of every module, against the gradient at `/in`"
    return Row(f"resnet50, batch 8, {note}", _ratio(report, plain))


def _ratio(one: Callable[[], object], other: Callable[[], object]) -> float:
    one()
    other()
    pairs = [(_seconds(one), _seconds(other)) for _ in range(_ROUNDS)]
    return statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)


def _seconds(call: Callable[[], object]) -> float:
    found = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return min(found)


def main() -> None:
    """Measure and print."""
    context = multiprocessing.get_context("spawn")
    pipe, child = context.Pipe()
    process = context.Process(target=_own_gradients, args=(child,), daemon=True)
    process.start()

    def own(model: str, shape: tuple[int, ...], path: str) -> float:
        pipe.send((model, shape, path))
        seconds: float = pipe.recv()
        return seconds

    one = [trocar.edit("layer3", "scale", 0.5)]
    part = [trocar.edit("layer3", "zero", channels=[1, 2])]
    all_relus = [trocar.edit("**:ReLU", "scale", 0.99)]
    large, small = (8, 3, 224, 224), (1, 3, 224, 224)
    models = [f"{name}=random:0" for name in _MODELS]
    with served(models) as address, trocar.connect(address) as client:
        rows = [
            edit_cost(client, "resnet18", small, one, "one edit"),
            edit_cost(client, "resnet50", large, one, "one edit"),
            edit_cost(client, "resnet50", large, part, "an edit of two channels"),
            replace(edit_cost(client, "resnet50", large, all_relus, "an edit of all 49 ReLUs"), target=None),
            patching_cost(client, "resnet50", large),
            gradient_cost(client, own, "resnet18", 1, ""),
            gradient_cost(client, own, "resnet50", 8, ""),
            gradient_cost(client, own, "resnet50", 8, "layer4"),
            health_cost(client),
        ]
    pipe.send(None)
    process.join()
    print_rows("Edits and gradients", rows)


if __name__ == "__main__":
    main()
