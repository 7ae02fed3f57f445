"""Penalties against the same sums in plain torch."""

import pytest
import torch
from torch import Tensor, nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.losses.regularizers import Penalties, penalty
from trocar_server.training.spec.trainer_spec import RegularizerSpec


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


def test_a_penalty_and_its_gradient_are_those_of_the_sums() -> None:
    mine, theirs = _net(), _net()
    specs = [
        RegularizerSpec(parameters=("**.weight",), norm="l2", weight=0.01),
        RegularizerSpec(parameters=("3",), norm="l1", weight=0.5),
    ]
    total = penalty(specs, dict(mine.named_parameters()), mine)
    weights = [parameter for name, parameter in theirs.named_parameters() if name.endswith("weight")]
    squares: Tensor = sum((p.square().sum() for p in weights), torch.zeros(()))
    absolutes: Tensor = sum((p.abs().sum() for p in theirs[3].parameters()), torch.zeros(()))
    expected = squares * 0.01 + absolutes * 0.5
    assert total is not None
    assert torch.equal(total, expected)
    total.backward()
    expected.backward()
    for own, other in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert (own.grad is None) == (other.grad is None)
        assert own.grad is None or other.grad is None or torch.equal(own.grad, other.grad)


def test_only_trained_parameters_count() -> None:
    net = _net()
    trained = {"3.weight": net.get_parameter("3.weight")}
    total = penalty([RegularizerSpec(parameters=("**",))], trained, net)
    assert total is not None
    assert torch.equal(total, trained["3.weight"].square().sum())


def test_a_class_chooses_parameters_when_the_tree_is_known() -> None:
    net = _net()
    total = penalty(
        [RegularizerSpec(parameters=("**:BatchNorm2d",), norm="l1")], dict(net.named_parameters()), net
    )
    assert total is not None
    assert float(total.detach()) == 4.0  # four weights of 1, four biases of 0


def test_penalties_follow_the_weights() -> None:
    net = _net()
    penalties = Penalties([RegularizerSpec(parameters=("3.bias",), norm="l1")], dict(net.named_parameters()))
    with torch.no_grad():
        net.get_parameter("3.bias").fill_(2.0)
    total = penalties()
    assert total is not None
    assert float(total.detach()) == 4.0


def test_without_penalties_there_is_none() -> None:
    assert penalty([], {}) is None


def test_a_penalty_of_nothing_is_refused() -> None:
    with pytest.raises(ServiceError, match=r"regularizers\[0\]\.parameters\[0\]: 'fc' matches no") as caught:
        penalty([RegularizerSpec(parameters=("fc",))], dict(_net().named_parameters()))
    assert caught.value.reason is ErrorReason.UNKNOWN_PARAMETER
