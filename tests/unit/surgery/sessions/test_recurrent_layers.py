"""Recurrent layers in a pass with gradients: where cuDNN is off, on a machine without it, too."""

import pytest
import torch

from tests.support.models.surgical_models import Noted
from tests.support.servers.serving import rebuilt
from trocar_server.engine.execute.collecting import PassSpec, collect
from trocar_server.engine.execute.scoring import Scoring
from trocar_server.engine.request.objective import Objective, Term, ValueScore
from trocar_server.surgery import GradientPoint, PassGuard, Surgery, Target, parse_selector

X = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(1))
OBJECTIVE = Objective((Term(1.0, ValueScore(parse_selector("fc"))),))
PLACES = {
    "input": Target("/grad_in", "", 0, "in", (0,), is_gradient=True),
    "conv": Target("conv/grad_out", "conv", 0, is_gradient=True),
    "lstm": Target("lstm/grad_in", "lstm", 0, "in", (0,), is_gradient=True),
    "weight": Target("weight", "lstm", 0, "param(weight_hh_l1)", is_gradient=True),
    "head": Target("fc/grad_in", "fc", 0, "in", (0,), is_gradient=True),
}


@pytest.fixture
def model() -> Noted:
    found: Noted = rebuilt(Noted).requires_grad_(False)
    found.notes()
    return found


def gradient(model: Noted, place: str, x: torch.Tensor = X) -> torch.Tensor:
    scoring = Scoring(OBJECTIVE, (Target("score", "fc", 0),), (), ())
    spec = PassSpec([], Surgery(points=(GradientPoint(PLACES[place]),)), scoring)
    with torch.no_grad():
        (found,) = collect(model, ([x.clone()], {}), spec, PassGuard()).values.values()
    return found


@pytest.mark.parametrize("place", ["input", "conv", "lstm", "weight"])
def test_a_layer_in_the_graph_runs_without_cudnn(model: Noted, place: str) -> None:
    gradient(model, place)
    assert model.notes() == {"conv": [True], "lstm": [False]}
    assert torch.backends.cudnn.enabled
    assert "forward" not in vars(model.lstm)


def test_a_layer_before_the_graph_keeps_cudnn(model: Noted) -> None:
    gradient(model, "head")
    assert model.notes()["lstm"] == [True]


def test_a_pass_without_gradients_keeps_cudnn(model: Noted) -> None:
    collect(model, ([X], {}), PassSpec([Target("fc", "fc", 0)]), PassGuard())
    assert model.notes()["lstm"] == [True]


def test_gradients_are_those_of_autograd_in_eval_mode(model: Noted) -> None:
    x = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    assert torch.equal(gradient(model, "input"), expected)


def test_cudnn_is_on_again_after_an_error_in_the_layer(model: Noted) -> None:
    with pytest.raises(FloatingPointError):
        gradient(model, "input", X * torch.nan)
    assert model.notes()["lstm"] == [False]
    assert torch.backends.cudnn.enabled
    assert "forward" not in vars(model.lstm)


def test_cudnn_stays_off_where_it_was_off(model: Noted) -> None:
    with torch.backends.cudnn.flags(enabled=False):
        gradient(model, "input")
        assert not torch.backends.cudnn.enabled
