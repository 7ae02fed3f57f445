"""Edits as requests, and as pyvene's interventions make them, on the same weights.

    pip install transformers sentencepiece && pip install --no-deps pyvene==0.1.8
    python -m tests.sweeps.against_pyvene
    python -m tests.sweeps.against_pyvene --models vit_b_32

Interchange, addition, subtraction, zero, skip and functions of every model; positions, and subspaces of the
width, where values are (batch, tokens, width). Prints a line a model, and exits with 1 where two results
differ by more than 1e-5 of their largest number. Measured with torch 2.14.1 on a CPU:

    densenet121              5 s   33 compared,   29 bit-equal, farthest 5.6e-07
    mobilenet_v3_large       1 s   33 compared,   29 bit-equal, farthest 1.2e-07
    convnext_tiny            3 s   33 compared,   29 bit-equal, farthest 4.8e-07
    efficientnet_lite0       2 s   33 compared,   29 bit-equal, farthest 8.1e-07
    swin_t                   4 s   33 compared,   29 bit-equal, farthest 3.7e-07
    vit_b_32                 8 s   37 compared,   32 bit-equal, farthest 6.5e-07
"""

import argparse
import importlib
import inspect
import sys
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import trocar
from tests.support.models.other_models import OTHER_MODELS, OtherModel, without_in_place
from tests.support.oracles.oracle import Array, noise
from tests.support.wire.changes import CHANGES, Place, Tally

pyvene: Any = importlib.import_module("pyvene")  # a name that type checkers need not find
TOKEN = 3
WIDTHS = [0, 1, 2, 7]


class Intervened:
    """A model in pyvene, which wants a config and a device of it, and its input by name."""

    def __init__(self, model: Any, places: OtherModel, x: Array) -> None:
        self.model = model
        self.model.config, self.model.device = SimpleNamespace(), torch.device("cpu")
        self.x, self.places = torch.from_numpy(x.copy()), places
        self.name = next(iter(inspect.signature(model.forward).parameters))

    def plain(self) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = self.model(self.x)
        return result

    def run(
        self,
        interventions: dict[str, Any],
        sources: Sequence[Array | None] = (),
        *,
        token: int | None = None,
        widths: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Return the output with interventions by component, each with its source."""
        made = [
            pyvene.RepresentationConfig(component=component, intervention=intervention)
            for component, intervention in interventions.items()
        ]
        given = [
            None if source is None else {self.name: torch.from_numpy(source.copy())} for source in sources
        ]
        options: dict[str, Any] = {}
        if token is not None:
            options["unit_locations"] = {"sources->base" if sources else "base": token}
        if widths is not None:
            options["subspaces"] = [[list(widths)] * len(self.x)]
        intervened = pyvene.IntervenableModel(pyvene.IntervenableConfig(made), model=self.model)
        with torch.no_grad():
            result: torch.Tensor = intervened({self.name: self.x}, given or None, **options)[1]
        return result


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
        request = Request(client, name, x)
        theirs = Intervened(without_in_place(model), places, x)
        _functions(request, theirs, place, tally)
        _interchanges(request, theirs, place, tally)
        if len(place.shape) == 3:
            _positions(request, theirs, place, tally)
            _subspace(request, theirs, place, tally)
        tally.add("afterwards", request.output(), theirs.plain())
    print(f"{name:<20} {time.perf_counter() - started:5.0f} s {tally}", flush=True)
    return not tally.wrong


class Request:
    """The same by requests."""

    def __init__(self, client: trocar.Client, name: str, x: Array) -> None:
        self.client, self.name, self.x = client, name, x

    def output(self, *edits: trocar.Edit, **sources: Array) -> Array:
        return self.client.extract(self.name, self.x, "/out", edits=edits, sources=sources)["/out"]


def _functions(request: Request, theirs: Intervened, place: Place, tally: Tally) -> None:
    for name, (make, in_torch) in CHANGES.items():

        def change(base: torch.Tensor, _: Any, in_torch: Any = in_torch) -> torch.Tensor:
            result: torch.Tensor = in_torch(place, base)
            return result

        found = request.output(make(place))
        tally.add(f"function {name}", found, theirs.run({f"{place.path}.output": change}))


def _interchanges(request: Request, theirs: Intervened, place: Place, tally: Tally) -> None:
    at, early = place.path, theirs.places.early
    a, b = noise(*request.x.shape, seed=5), noise(*request.x.shape, seed=6)
    output, taken = f"{at}.output", f"{at}.input"
    vector = place.numbers(place.shape[-1])
    cases: dict[str, tuple[Array, torch.Tensor]] = {
        "interchange": (
            request.output(trocar.edit(at, "swap", source="a"), a=a),
            theirs.run({output: pyvene.VanillaIntervention()}, [a]),
        ),
        "interchange of an input": (
            request.output(trocar.edit(f"{at}/in", "swap", source="a"), a=a),
            theirs.run({taken: pyvene.VanillaIntervention()}, [a]),
        ),
        "interchange from two": (
            request.output(trocar.edit(early, "swap", source="a"), place.edit("add", vector.numpy()), a=a),
            theirs.run(
                {
                    f"{early}.output": pyvene.VanillaIntervention(),
                    output: pyvene.AdditionIntervention(source_representation=vector),
                },
                [a, None],
            ),
        ),
        "zero": (request.output(place.edit("zero")), theirs.run({output: pyvene.ZeroIntervention()})),
        "addition": (
            request.output(trocar.edit(at, "add", vector.numpy())),
            theirs.run({output: pyvene.AdditionIntervention(source_representation=vector)}),
        ),
        "subtraction": (
            request.output(trocar.edit(at, "add", -vector.numpy())),
            theirs.run({output: pyvene.SubtractionIntervention(source_representation=vector)}),
        ),
        "skip": (
            request.output(trocar.edit(at, "skip")),
            theirs.run({output: pyvene.SkipIntervention()}, [request.x]),
        ),
        "part of two": (
            request.output(
                trocar.edit(early, "swap", source="a", samples=[0]),
                trocar.edit(at, "swap", source="b", samples=[1]),
                a=a,
                b=b,
            ),
            theirs.run({f"{early}.output": _of_sample(0), output: _of_sample(1)}, [a, b]),
        ),
    }
    for name, (found, expected) in cases.items():
        tally.add(name, found, expected)


def _of_sample(sample: int) -> Any:
    def change(base: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        result = base.clone()
        result[sample] = source[sample]
        return result

    return change


def _positions(request: Request, theirs: Intervened, place: Place, tally: Tally) -> None:
    at, output = place.path, f"{place.path}.output"
    a = noise(*request.x.shape, seed=5)
    swapped = request.output(trocar.edit(at, "swap", source="a", tokens=[TOKEN]), a=a)
    tally.add("one token", swapped, theirs.run({output: pyvene.VanillaIntervention()}, [a], token=TOKEN))
    part = trocar.edit(at, "swap", source="a", tokens=[TOKEN], channels=WIDTHS)
    expected = theirs.run({output: pyvene.VanillaIntervention()}, [a], token=TOKEN, widths=WIDTHS)
    tally.add("some numbers of one token", request.output(part, a=a), expected)
    zero = trocar.edit(at, "zero", tokens=[TOKEN])
    expected = theirs.run({output: pyvene.ZeroIntervention()}, token=TOKEN)
    tally.add("one token zeroed", request.output(zero), expected)


def _subspace(request: Request, theirs: Intervened, place: Place, tally: Tally) -> None:
    """Interchange in a subspace: what is in it is taken out, and the source's part of it put in."""
    at, a = place.path, noise(*request.x.shape, seed=5)
    torch.manual_seed(0)
    rotated = pyvene.LowRankRotatedSpaceIntervention(
        embed_dim=place.width, low_rank_dimension=4, keep_last_dim=True
    )
    basis = rotated.rotate_layer.weight.detach().T.contiguous().numpy()
    projected = trocar.edit(at, "project_onto", basis)
    source = request.client.extract(request.name, a, at, edits=[projected])[at]
    found = request.output(trocar.edit(at, "project_out", basis), trocar.edit(at, "add", source))
    tally.add("interchange in a subspace", found, theirs.run({f"{at}.output": rotated}, [a]))
    assert np.linalg.matrix_rank(basis) == 4


if __name__ == "__main__":
    sys.exit(main())
