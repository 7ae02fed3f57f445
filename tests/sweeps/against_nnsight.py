"""Edits and gradients as requests, and as nnsight makes them, on the same weights.

    pip install nnsight==0.8.1              # no dependency of the tests: it brings transformers
    python -m tests.sweeps.against_nnsight
    python -m tests.sweeps.against_nnsight --models swin_t

Prints a line a model, and exits with 1 where two results differ by more than 1e-5 of their largest number.
nnsight gets a copy without in-place modules. Measured with torch 2.14.1 on a CPU: of 76 results of each model
59 to 65 are bit-equal, and the farthest is 1.0e-6 away:

    densenet121             18 s   76 compared,   65 bit-equal, farthest 8.8e-07
    mobilenet_v3_large       8 s   76 compared,   65 bit-equal, farthest 5.5e-07
    convnext_tiny            9 s   76 compared,   59 bit-equal, farthest 4.8e-07
    efficientnet_lite0       7 s   76 compared,   65 bit-equal, farthest 8.1e-07
    swin_t                  10 s   76 compared,   65 bit-equal, farthest 5.8e-07
    vit_b_32                13 s   76 compared,   65 bit-equal, farthest 1.0e-06
"""

import argparse
import importlib
import sys
import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

import trocar
from tests.support.models.other_models import OTHER_MODELS, OtherModel, without_in_place
from tests.support.oracles.oracle import Array, noise
from tests.support.wire.changes import CHANGES, INDICES, Place, Tally, some_channels

Change = Callable[[torch.Tensor], torch.Tensor]
CLASSES = [3, 141]


class Traced:
    """A model in nnsight, which runs the source of each `with` block elsewhere."""

    def __init__(self, model: nn.Module, places: OtherModel, x: Array) -> None:
        self.x = torch.from_numpy(x.copy())
        self.model = importlib.import_module("nnsight").NNsight(model)
        self.early, self.late = self._module(places.early), self._module(places.late)

    def _module(self, path: str) -> Any:
        module = self.model
        for name in path.split("."):
            module = module[int(name)] if name.isdigit() else getattr(module, name)
        return module

    def plain(self) -> Any:
        with self.model.trace(self.x):
            result = self.model.output.save()
        return result  # noqa: RET504

    def output_changed(self, change: Change) -> tuple[torch.Tensor, torch.Tensor]:
        with self.model.trace(self.x):
            changed: Any = change(self.late.output)
            self.late.output = changed
            value = changed.save()
            result = self.model.output.save()
        return value, result

    def input_changed(self, change: Change) -> Any:
        with self.model.trace(self.x):
            self.late.input = change(self.late.input)
            result = self.model.output.save()
        return result  # noqa: RET504

    def input_added(self) -> Any:
        with self.model.trace(self.x):
            taken = self.late.input.clone()
            self.late.output = self.late.output + taken
            result = self.model.output.save()
        return result  # noqa: RET504

    def skipped(self) -> Any:
        with self.model.trace(self.x):
            self.late.skip(self.late.input)
            result = self.model.output.save()
        return result  # noqa: RET504

    def value(self, other: torch.Tensor) -> Any:
        with self.model.trace(other):
            result = self.late.output.clone().save()
        return result  # noqa: RET504

    def swapped_within(self) -> Any:
        with self.model.trace(self.x):
            value = self.early.output.clone()
            self.late.output = value
            result = self.model.output.save()
        return result  # noqa: RET504

    def both_changed(self, first: Change, second: Change) -> Any:
        with self.model.trace(self.x):
            self.early.output = first(self.early.output)
            self.late.output = second(self.late.output)
            result = self.model.output.save()
        return result  # noqa: RET504

    def gradients(self, change: Change | None = None) -> list[torch.Tensor]:
        """Return gradients at the late module, where it may be changed, at the early one and the input."""
        leaf = self.x.clone().requires_grad_()
        with self.model.trace(leaf):
            early = self.early.output
            late: Any = self.late.output
            score = self.model.output[[0, 1], CLASSES].sum()
            with score.backward():
                if change is not None:
                    late.grad = change(late.grad)
                of_late = cast(Any, late.grad).save()
                of_early = early.grad.save()
        assert leaf.grad is not None
        return [of_late, of_early, leaf.grad]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=list(OTHER_MODELS), help="names; all by default")
    failed = [name for name in parser.parse_args().models if not _check(name)]
    return 1 if failed else 0


def _check(name: str) -> bool:
    started, places = time.perf_counter(), OTHER_MODELS[name]
    model, x = places.built(), noise(2, *places.shape)
    hosted = {name: {"module": model, "input_shape": places.shape}}
    place = Place.of(model, places.late, places, torch.from_numpy(x))
    tally = Tally()
    with trocar.connect("local", models=hosted, settings={"device": "cpu"}) as client:
        request = Request(client, name, x, places)
        traced = Traced(without_in_place(model), places, x)
        _operations(request, traced, place, tally)
        _structures(request, traced, place, tally)
        _gradients(request, traced, place, tally)
        tally.add("afterwards", request.output(), traced.plain())
    print(f"{name:<20} {time.perf_counter() - started:5.0f} s {tally}", flush=True)
    return not tally.wrong


class Request:
    """The same by requests."""

    def __init__(self, client: trocar.Client, name: str, x: Array, places: OtherModel) -> None:
        self.client, self.name, self.x, self.places = client, name, x, places

    def output(self, *edits: trocar.Edit, **options: Any) -> Array:
        return self.client.extract(self.name, self.x, "/out", edits=edits, **options)["/out"]

    def gradients(self, *edits: trocar.Edit) -> list[Array]:
        at = [self.places.late, self.places.early, "/in"]
        of = trocar.logit(CLASSES)
        found = self.client.gradients(self.name, self.x, of=of, at=at, edits=edits)
        return [found[place] for place in at]


def _operations(request: Request, traced: Traced, place: Place, tally: Tally) -> None:
    for name, (make, in_torch) in CHANGES.items():
        taps = [place.path, "/out"]
        found = request.client.extract(request.name, request.x, taps, edits=[make(place)])

        def change(value: torch.Tensor, in_torch: Any = in_torch) -> torch.Tensor:
            result: torch.Tensor = in_torch(place, value)
            return result

        value, result = traced.output_changed(change)
        if name != "zero":
            tally.add(f"{name}, value", found[place.path], value)
        tally.add(name, found["/out"], result)


def _structures(request: Request, traced: Traced, place: Place, tally: Tally) -> None:
    late, early = request.places.late, request.places.early
    other = noise(*request.x.shape, seed=9)
    tally.add(
        "input", request.output(trocar.edit(f"{late}/in", "affine", 2, 1)), traced.input_changed(_affine)
    )
    tally.add("add_input", request.output(trocar.edit(late, "add_input")), traced.input_added())
    tally.add("skip", request.output(trocar.edit(late, "skip")), traced.skipped())
    value = traced.value(torch.from_numpy(other))
    sources = {"other": other}
    whole = request.output(trocar.edit(late, "swap", source="other"), sources=sources)
    tally.add("patch", whole, traced.output_changed(lambda _: value)[1])
    part = request.output(place.edit("swap", source="other", channels=INDICES), sources=sources)
    own = value.movedim(place.channel_dim, 0)[INDICES]
    patched = traced.output_changed(lambda x: some_channels(place, x, lambda _: own))
    tally.add("patch channels", part, patched[1])
    tally.add("swap within", request.output(trocar.edit(late, "swap", at=early)), traced.swapped_within())
    both = request.output(
        trocar.edit(early, "scale", 2), trocar.edit(late, "add", 1), trocar.edit(late, "scale", 3)
    )
    tally.add("three edits", both, traced.both_changed(lambda x: x * 2, lambda x: (x + 1) * 3))


def _affine(x: torch.Tensor) -> torch.Tensor:
    return x * 2 + 1


def _gradients(request: Request, traced: Traced, place: Place, tally: Tally) -> None:
    at = f"{request.places.late}/grad_out"
    cases: dict[str, tuple[list[trocar.Edit], Change | None]] = {
        "as they are": ([], None),
        "doubled": ([trocar.edit(at, "scale", 2)], lambda g: g * 2),
        "clamped": ([trocar.edit(at, "clamp", low=0)], lambda g: g.clamp(min=0)),
        "set": ([trocar.edit(at, "set", 42)], lambda g: torch.full_like(g, 42)),
        "channels zeroed": (
            [trocar.edit(at, "zero", channels=INDICES, channel_dim=place.channel_dim)],
            lambda g: some_channels(place, g, torch.zeros_like),
        ),
        "two": (
            [trocar.edit(at, "add", 0.01), trocar.edit(at, "scale", -1)],
            lambda g: (g + 0.01) * -1,
        ),
        "limited": (
            [trocar.edit(at, "normalise", 1e-3)],
            lambda g: g * (1e-3 / g.flatten(1).norm(dim=1).reshape(-1, *[1] * (g.dim() - 1))).clamp(max=1),
        ),
    }
    for name, (edits, change) in cases.items():
        for where, found, expected in zip(
            ("late", "early", "input"), request.gradients(*edits), traced.gradients(change), strict=True
        ):
            tally.add(f"gradient at {where}, {name}", found, expected)


if __name__ == "__main__":
    sys.exit(main())
