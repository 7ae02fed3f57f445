"""Trials on one batch: a model that overflows is rejected, and odd batches tell nothing."""

import pytest
import torch
from torch import nn

from tests.support.models.not_finite_models import FINITE, OVERFLOWING, WIDTH, Hiding
from tests.unit.engine.compiled.backends.nets import Words, folding, out, recipe, seeded
from trocar_server.engine.compiled.backends.recipe import ArgumentSpec, Recipe
from trocar_server.engine.compiled.backends.torch_runner import TorchRunner
from trocar_server.engine.compiled.variant_trial import NOT_FINITE, NOT_WITHIN, problem_of
from trocar_server.engine.request.numerics import Numerics
from trocar_server.engine.schedule.lease import Replica
from trocar_server.models import Pristine, make_replica

BATCHES = {
    "random": torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0)),
    "zeros": torch.zeros(2, 3, 8, 8),
    "one value": torch.full((1, 3, 8, 8), -0.5),
    "whole numbers": torch.arange(192.0).reshape(1, 3, 8, 8),
    "large": torch.full((2, 3, 8, 8), -1e6),
}
IDS = torch.tensor([[1, 2, 9, 4], [1, 7, 3, 0]])


class Convolution(nn.Module):
    """A convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.conv(x)
        return made


def problem(model: nn.Module, wanted: Recipe, batch: torch.Tensor, numerics: Numerics) -> str:
    runner = TorchRunner(make_replica(model), wanted, [], numerics)
    return problem_of(runner, wanted, lambda: [batch.clone()], Replica(Pristine(model)), 0.0)


@pytest.mark.parametrize("numerics", [Numerics.FAST, Numerics.BF16])
@pytest.mark.parametrize("batch", BATCHES)
def test_samples_on_their_own_pass(batch: str, numerics: Numerics) -> None:
    assert problem(seeded(Convolution), recipe(out("conv")), BATCHES[batch], numerics) == ""


def test_a_network_with_batch_norms_in_eval_mode_passes() -> None:
    wanted = recipe(out("conv"), out("norm"), out("fc"))
    assert problem(folding(), wanted, BATCHES["random"], Numerics.FAST) == ""


def test_whole_numbers_pass() -> None:
    wanted = Recipe((ArgumentSpec(torch.int64, (4,)),), (out("fc"),))
    assert problem(seeded(Words), wanted, IDS, Numerics.FAST) == ""


ROWS = Recipe((ArgumentSpec(torch.float32, (WIDTH,)),), (out("last"),))
SMALL = torch.rand(2, WIDTH, generator=torch.Generator().manual_seed(0)) / 8


@pytest.mark.parametrize("step", OVERFLOWING)
def test_a_pass_that_overflows_for_larger_inputs_is_rejected(step: str) -> None:
    assert problem(Hiding(step).eval(), ROWS, SMALL, Numerics.FAST) == "inputs of 1e6 overflow in a pass"


@pytest.mark.parametrize("step", FINITE)
def test_a_pass_that_stays_finite_passes(step: str) -> None:
    assert problem(Hiding(step).eval(), ROWS, SMALL, Numerics.FAST) == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38, -1e38, 2e6])
def test_a_batch_that_eager_computes_tells_nothing(value: float) -> None:
    batch = SMALL.clone()
    batch[1, 2] = value
    assert problem(Hiding("square").eval(), ROWS, batch, Numerics.FAST) == NOT_WITHIN


def test_values_that_are_not_finite_tell_nothing() -> None:
    assert problem(Hiding("logarithm").eval(), ROWS, -SMALL, Numerics.FAST) == NOT_FINITE


def test_half_floats_end_earlier() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Identity()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.last(x * 2)
            return found

    wanted = Recipe((ArgumentSpec(torch.float16, (WIDTH,)),), (out("last"),))
    assert problem(Twice().eval(), wanted, SMALL.half(), Numerics.FAST) == ""
    assert problem(Twice().eval(), wanted, (SMALL * 8000).half(), Numerics.FAST) == NOT_WITHIN
