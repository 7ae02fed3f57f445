"""Compiled passes of models with habits: a tensor with two names, tuples, whole numbers, other dtypes."""

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.unit.engine.compiled.backends.nets import (
    Aliasing,
    Recurrent,
    Returning,
    Words,
    Wrapped,
    into,
    out,
    recipe,
    seeded,
)
from tests.unit.engine.compiled.backends.test_torch_runner import eager
from trocar_server.engine.compiled.backends.conversion import convert
from trocar_server.engine.compiled.backends.folding import find_pairs
from trocar_server.engine.compiled.backends.openvino_runner import OpenVinoRunner
from trocar_server.engine.compiled.backends.recipe import ArgumentSpec, Recipe
from trocar_server.engine.compiled.backends.torch_runner import TorchRunner
from trocar_server.engine.request.numerics import Numerics, worst_deviation
from trocar_server.models import make_replica
from trocar_server.surgery import Target

BOTH = pytest.mark.parametrize("numerics", [Numerics.FAST, Numerics.BF16])


def picked(path: str, *picks: int | str) -> Target:
    return Target(f"{path}{picks}", path, 0, "out", picks)


CASES: dict[str, tuple[type[nn.Module], Recipe]] = {
    "aliases": (
        Aliasing,
        recipe(
            into("first"),
            *(out(path) for path in ("first", "identity", "dropout", "relu", "fc", "")),
            out("relu", 1),
            into("fc"),
            row=(4,),
        ),
    ),
    "returned": (
        Returning,
        recipe(
            picked("", "most"),
            picked("", "is_positive"),
            picked("", "rest", 0),
            picked("", "rest", 1),
            out("fc"),
            row=(4,),
        ),
    ),
    "recurrent": (
        Recurrent,
        recipe(
            picked("attention", 0),
            picked("attention", 1),
            picked("lstm", 0),
            picked("lstm", 1, 0),
            picked("lstm", 1, 1),
            out(""),
            row=(3, 4),
        ),
    ),
    "words": (
        Words,
        Recipe((ArgumentSpec(torch.int64, (6,)),), (into("embedding"), out("embedding"), out("fc"), out(""))),
    ),
    "wrapped": (Wrapped, recipe(out("before"), into("behind"), out("behind"), row=(3, 6, 6))),
}


@pytest.mark.parametrize("case", CASES)
@BOTH
def test_torch_computes_the_values_of_the_eager_pass(case: str, numerics: Numerics) -> None:
    kind, wanted = CASES[case]
    model = seeded(kind)
    runner = TorchRunner(make_replica(model), wanted, find_pairs(model), numerics)
    assert worst_share(model, wanted, numerics, runner) < 2


@pytest.mark.parametrize("case", CASES)
def test_openvino_computes_the_values_of_the_eager_pass(case: str, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    kind, wanted = CASES[case]
    model = seeded(kind)
    convert(model, wanted, tmp_path)
    for numerics in (Numerics.FAST, Numerics.BF16):
        runner = OpenVinoRunner(tmp_path, wanted, numerics, 1)
        assert worst_share(model, wanted, numerics, runner) < 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
@BOTH
def test_values_keep_the_dtype_of_the_model(dtype: torch.dtype, numerics: Numerics) -> None:
    model = seeded(Aliasing).to(dtype)
    wanted = Recipe((ArgumentSpec(dtype, (4,)),), (out("relu"), out("fc")))
    found = TorchRunner(make_replica(model), wanted, [], numerics).run([given(wanted, 3)])
    assert {value.dtype for value in found.values()} == {dtype}
    assert worst_deviation(numerics, eager(model, wanted, given(wanted, 3)), found) < 2


def test_values_that_no_input_reaches_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    with pytest.raises(ValueError, match="depend"):
        convert(seeded(Returning), recipe(picked("", "rest", 1), row=(4,)), tmp_path)


def test_a_tensor_with_two_names_is_computed_once(tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    wanted = recipe(out("identity"), out("first"), out("dropout"), row=(4,))
    convert(seeded(Aliasing), wanted, tmp_path)
    compiled = openvino.Core().compile_model(tmp_path / "graph.xml", "CPU")
    kinds = [node.get_rt_info()["layerType"] for node in compiled.get_runtime_model().get_ops()]
    assert not {"Eltwise", "Math"} & {str(kind) for kind in kinds}


def worst_share(
    model: nn.Module, wanted: Recipe, numerics: Numerics, runner: TorchRunner | OpenVinoRunner
) -> float:
    """Return how much of the promise the worst of some batch sizes uses."""
    values = [given(wanted, rows) for rows in (1, 3, 4)]
    with torch.inference_mode():
        return max(
            worst_deviation(numerics, eager(model, wanted, value), runner.run([value])) for value in values
        )


def given(wanted: Recipe, rows: int) -> torch.Tensor:
    spec = wanted.arguments[0]
    chance = torch.Generator().manual_seed(rows)
    if not spec.dtype.is_floating_point:
        return torch.randint(0, 10, (rows, *spec.row_shape), generator=chance)
    return torch.randn((rows, *spec.row_shape), generator=chance).to(spec.dtype)
