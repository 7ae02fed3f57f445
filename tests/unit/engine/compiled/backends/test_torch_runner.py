"""Passes of a folded tree in another layout."""

import pytest
import torch
from torch import nn

from tests.unit.engine.compiled.backends.nets import batch, folding, into, out, recipe
from trocar_server.engine.compiled.backends.folding import find_pairs, without_taps_between
from trocar_server.engine.compiled.backends.recipe import Recipe
from trocar_server.engine.compiled.backends.torch_runner import TorchRunner
from trocar_server.engine.request.numerics import Numerics, worst_deviation
from trocar_server.models import make_replica
from trocar_server.surgery import TapSession


def eager(model: nn.Module, wanted: Recipe, value: torch.Tensor) -> dict[str, torch.Tensor]:
    with torch.inference_mode(), TapSession(model, wanted.targets) as session:
        model(value)
    return session.values


def test_only_a_convolution_that_the_norm_alone_reads_is_folded() -> None:
    assert find_pairs(folding()) == [("conv", "norm")]


def test_a_norm_in_training_is_not_folded() -> None:
    assert find_pairs(folding().train()) == []


def test_a_convolution_that_is_called_twice_is_not_folded() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 3, padding=1)
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.norm(self.conv(self.conv(x)))
            return found

    assert find_pairs(Twice().eval()) == []


def test_a_model_that_cannot_be_traced_has_no_pairs() -> None:
    class Deciding(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    assert find_pairs(Deciding().eval()) == []


@pytest.mark.parametrize("target", [out("conv"), into("norm")])
def test_a_value_between_the_two_keeps_them_apart(target: object) -> None:
    assert without_taps_between([("conv", "norm")], recipe(target)) == []  # type: ignore[arg-type]


@pytest.mark.parametrize("target", [out("norm"), into("conv"), out("fc")])
def test_a_value_before_or_behind_the_two_does_not(target: object) -> None:
    assert without_taps_between([("conv", "norm")], recipe(target)) == [("conv", "norm")]  # type: ignore[arg-type]


@pytest.mark.parametrize("numerics", [Numerics.FAST, Numerics.BF16])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_values_are_those_of_the_eager_pass(numerics: Numerics, rows: int) -> None:
    model = folding()
    wanted = recipe(out("conv"), out("norm"), out("relu", 0), out("relu", 1), into("fc"), out("fc"))
    expected = eager(model, wanted, batch(rows))
    found = TorchRunner(make_replica(model), wanted, find_pairs(model), numerics).run([batch(rows)])
    limit = 1.0 if numerics is Numerics.FAST else 2.0
    assert worst_deviation(numerics, expected, found) < limit


def test_the_model_itself_stays_as_it_was() -> None:
    model = folding()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pointers = {name: value.data_ptr() for name, value in model.state_dict().items()}
    TorchRunner(make_replica(model), recipe(out("fc")), find_pairs(model), Numerics.BF16).run([batch()])
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert {name: value.data_ptr() for name, value in after.items()} == pointers
    assert all(value.dtype is before[name].dtype for name, value in after.items())


def test_a_pass_ends_where_the_last_value_is() -> None:
    model = folding()
    runner = TorchRunner(make_replica(model), recipe(out("relu", 0)), [], Numerics.FAST)
    runner._replica.module.fc.weight = None  # type: ignore[union-attr]  # a pass that goes on fails here
    assert runner.run([batch()]).keys() == {"relu@0"}
