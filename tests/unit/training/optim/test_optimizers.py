"""Optimizers against torch's own, bit for bit, and the options that are refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.optim.optimizers import CLASSES, known_options, make_optimizer
from trocar_server.training.spec.trainer_spec import OptimizerSpec, ParameterGroupSpec


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


def _train(
    net: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer], steps: int = 4
) -> list[Tensor]:
    """Take steps on seeded data and return the weights."""
    optimizer = make(net)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)

        def closure(x: Tensor = x, y: Tensor = y) -> float:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(x), y)
            loss.backward()
            return loss  # type: ignore[return-value]  # as torch's own closures do

        optimizer.step(closure)
    return [parameter.detach() for parameter in net.parameters()]


def _made(spec: OptimizerSpec) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda net: make_optimizer(spec, dict(net.named_parameters()), net)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        ("sgd", {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "maximize": True, "foreach": False}),
        ("adam", {"lr": 0.01, "betas": [0.8, 0.95], "amsgrad": True, "eps": 1e-6}),
        ("adamw", {"lr": 0.01, "weight_decay": 0.1}),
        ("rmsprop", {"lr": 0.01, "alpha": 0.9, "momentum": 0.5, "centered": True}),
        ("adagrad", {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
        ("lbfgs", {"lr": 0.5, "max_iter": 5, "history_size": 3, "line_search_fn": "strong_wolfe"}),
        ("sgd", {}),
        ("lbfgs", {}),
    ],
)
def test_steps_are_those_of_torch(name: Any, options: dict[str, Any]) -> None:
    plain: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in options.items()
    }
    mine = _train(_net(), _made(OptimizerSpec(name=name, options=options)))
    theirs = _train(_net(), lambda net: CLASSES[name](net.parameters(), **plain))
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_groups_have_rates_of_their_own_and_the_first_that_names_a_parameter_has_it() -> None:
    spec = OptimizerSpec(
        name="adamw",
        options={"lr": 0.01},
        groups=(
            ParameterGroupSpec(parameters=("3.bias", "**:BatchNorm1d"), options={"weight_decay": 0.0}),
            ParameterGroupSpec(parameters=("3",), options={"lr": 0.1, "betas": [0.5, 0.9]}),
        ),
    )

    def by_hand(net: nn.Module) -> torch.optim.Optimizer:
        named = dict(net.named_parameters())
        groups: list[dict[str, Any]] = [
            {"params": [named["1.weight"], named["1.bias"], named["3.bias"]], "weight_decay": 0.0},
            {"params": [named["3.weight"]], "lr": 0.1, "betas": (0.5, 0.9)},
            {"params": [named["0.weight"], named["0.bias"]]},
        ]
        return torch.optim.AdamW(groups, lr=0.01)

    mine, theirs = _train(_net(), _made(spec)), _train(_net(), by_hand)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_where_groups_name_everything_there_is_no_last_one() -> None:
    spec = OptimizerSpec(groups=(ParameterGroupSpec(parameters=("**",), options={"lr": 0.5}),))
    assert [group["lr"] for group in _made(spec)(_net()).param_groups] == [0.5]


def test_frozen_parameters_are_in_no_group() -> None:
    net = _net()
    named = {name: parameter for name, parameter in net.named_parameters() if name.startswith("3")}
    spec = OptimizerSpec(groups=(ParameterGroupSpec(parameters=("**.weight",), options={"lr": 0.5}),))
    optimizer = make_optimizer(spec, named, net)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_what_would_change_how_steps_are_taken_is_not_offered(name: str) -> None:
    assert not {"params", "fused", "capturable", "differentiable"} & set(known_options(name))
    assert "lr" in known_options(name)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("sgd", {"momentun": 0.9}, r"optimizer.options.momentun: sgd has no such option; nearest: momentum"),
        ("sgd", {"betas": [0.9, 0.99]}, "sgd has no such option"),
        ("sgd", {"fused": True}, "no such option"),
        ("adam", {"capturable": True}, "no such option"),
        ("sgd", {"lr": "fast"}, "optimizer.options.lr: must be a finite number, not 'fast'"),
        ("sgd", {"lr": True}, "must be a finite number, not True"),
        ("sgd", {"lr": float("nan")}, "must be a finite number, not nan"),
        ("sgd", {"lr": float("inf")}, "must be a finite number, not inf"),
        ("sgd", {"lr": None}, "must be a finite number"),
        ("sgd", {"lr": -0.1}, "PyTorch rejects them: Invalid learning rate"),
        ("sgd", {"nesterov": True}, "PyTorch rejects them: Nesterov"),
        ("sgd", {"nesterov": 1.0, "momentum": 0.9}, "must be true or false"),
        ("adam", {"betas": [0.9]}, "a list of two numbers"),
        ("adam", {"betas": [0.9, 1.0]}, "PyTorch rejects them: Invalid beta"),
        ("adam", {"betas": 0.9}, "a list of two numbers"),
        ("lbfgs", {"max_iter": 0}, "a whole number from 1 to 1000"),
        ("lbfgs", {"max_iter": 2.5}, "a whole number from 1 to 1000"),
        ("lbfgs", {"line_search_fn": "armijo"}, "strong_wolfe or unset"),
        ("lbfgs", {"lr": 10**400}, "a finite number"),
    ],
)
def test_wrong_options_are_refused(name: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ServiceError, match=message) as caught:
        _made(OptimizerSpec(name=name, options=options))(_net())
    assert caught.value.reason is ErrorReason.TRAINER_INVALID


def test_all_problems_come_in_one_error() -> None:
    spec = OptimizerSpec(
        options={"lr": -1.0, "x": 1},
        groups=(
            ParameterGroupSpec(parameters=("nothing",), options={"momentum": "a"}),
            ParameterGroupSpec(parameters=("3", "0")),
            ParameterGroupSpec(parameters=("3.bias",)),
        ),
    )
    with pytest.raises(ServiceError) as caught:
        _made(spec)(_net())
    for part in (
        "5 problems",
        "optimizer.options.x: sgd has no such option",
        "optimizer.options: PyTorch rejects them: Invalid learning rate",
        "optimizer.groups[0].options.momentum: must be a finite number",
        "optimizer.groups[0].parameters[0]: 'nothing' matches no parameter",
        "optimizer.groups[2].parameters: all of its parameters are frozen or in an earlier group",
    ):
        assert part in caught.value.message


def test_a_group_with_an_impossible_rate_is_refused_though_torch_would_take_it() -> None:
    spec = OptimizerSpec(groups=(ParameterGroupSpec(parameters=("3",), options={"lr": -1.0}),))
    with pytest.raises(
        ServiceError, match=r"optimizer.groups\[0\].options: PyTorch rejects them: Invalid learning"
    ):
        _made(spec)(_net())


def test_lbfgs_has_no_groups() -> None:
    spec = OptimizerSpec(name="lbfgs", groups=(ParameterGroupSpec(parameters=("3",)),))
    with pytest.raises(ServiceError, match="torch's LBFGS has no parameter groups"):
        _made(spec)(_net())
