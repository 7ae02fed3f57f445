"""Which parameters selectors mean."""

from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.model.trained_parameters import (
    Names,
    is_of_values,
    select_modules,
    select_names,
    select_parameters,
    trained_parameters,
)


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = torchvision.models.resnet18()
    return model


def _starting(model: nn.Module, *starts: str) -> tuple[str, ...]:
    return tuple(name for name, _ in model.named_parameters() if name.startswith(starts))


@pytest.mark.parametrize(
    ("selectors", "starts"),
    [
        (("fc",), ("fc.",)),
        (("fc", "layer4"), ("layer4.", "fc.")),
        (("layer4.1.*",), ("layer4.1.",)),
        (("layer4.1.bn1", "layer4.1.bn1.weight"), ("layer4.1.bn1.",)),
        (("re:layer[34]",), ("layer3.", "layer4.")),
        (("layer4.1.bn1/param(weight)",), ("layer4.1.bn1.weight",)),
        (("fc/param(*)",), ("fc.",)),
        (("fc.bias",), ("fc.bias",)),
        (("fc.*",), ("fc.",)),
        (('"fc".bias',), ("fc.bias",)),
        (("**",), ("",)),
        (("/param_grad(*)", "fc"), ("fc.",)),
    ],
)
def test_a_selector_means(resnet: nn.Module, selectors: tuple[str, ...], starts: tuple[str, ...]) -> None:
    if selectors[0].startswith("/"):
        with pytest.raises(ServiceError, match="a module without floating-point parameters"):
            select_parameters(resnet, selectors, "trainable")
        return
    assert select_parameters(resnet, selectors, "trainable") == _starting(resnet, *starts)


def test_patterns_of_names_match_parameters(resnet: nn.Module) -> None:
    found = select_parameters(resnet, ("layer4.**.weight",), "trainable")
    assert found == tuple(name for name in _starting(resnet, "layer4.") if name.endswith(".weight"))


def test_classes_choose_modules(resnet: nn.Module) -> None:
    found = select_parameters(resnet, ("layer4.**:BatchNorm2d",), "trainable")
    assert found == tuple(n for n in _starting(resnet, "layer4.") if ".bn" in n or "downsample.1" in n)
    assert select_parameters(resnet, ("**:Linear",), "trainable") == ("fc.weight", "fc.bias")


def test_stages_are_known_by_name(resnet: nn.Module) -> None:
    found = select_parameters(resnet, ("stage4",), "trainable", {"stage4": "layer4"})
    assert found == _starting(resnet, "layer4.")


@pytest.mark.parametrize("text", ["layer4", '"layer4"', "layer4.*"])
def test_a_module_comes_before_a_stage_of_its_name(resnet: nn.Module, text: str) -> None:
    stages = {"layer4": "layer4.1"}
    assert select_parameters(resnet, (text,), "trainable", stages) == _starting(resnet, "layer4.")
    found = select_modules(resnet, ("layer4",), "train_mode", stages)
    assert found == ("layer4",)


def test_a_name_in_quotes_is_no_stage(resnet: nn.Module) -> None:
    with pytest.raises(ServiceError, match="matches no parameter"):
        select_parameters(resnet, ('"stage4"',), "trainable", {"stage4": "layer4"})


@pytest.mark.parametrize(
    ("text", "reason", "message"),
    [
        (
            "layer5",
            ErrorReason.UNKNOWN_PARAMETER,
            r"trainable\[0\]: 'layer5' matches no parameter; nearest: layer",
        ),
        ("fc.weigth", ErrorReason.UNKNOWN_PARAMETER, "nearest: fc.weight"),
        ("relu", ErrorReason.UNKNOWN_PARAMETER, "a module without floating-point parameters"),
        ("", ErrorReason.INVALID_SELECTOR, r"trainable\[0\]: "),
        ("fc:", ErrorReason.INVALID_SELECTOR, "expected the name of a class"),
        ("fc/in", ErrorReason.INVALID_SELECTOR, "a value of a pass"),
        ("fc/out", ErrorReason.INVALID_SELECTOR, "a value of a pass"),
        ("fc/grad_out", ErrorReason.INVALID_SELECTOR, "a value of a pass"),
        ("fc@0", ErrorReason.INVALID_SELECTOR, "a value of a pass"),
        ("fc[0]", ErrorReason.INVALID_SELECTOR, "a value of a pass"),
        ("fx:fc", ErrorReason.INVALID_SELECTOR, "a value of a pass"),
        ("fn:relu", ErrorReason.INVALID_SELECTOR, "a value of a pass"),
        ("fc/param(running_mean)", ErrorReason.UNKNOWN_PARAMETER, "without floating-point parameters"),
        ("bn1.running_mean", ErrorReason.UNKNOWN_PARAMETER, "matches no parameter"),
    ],
)
def test_what_means_no_parameter_is_refused(
    resnet: nn.Module, text: str, reason: ErrorReason, message: str
) -> None:
    with pytest.raises(ServiceError, match=message) as caught:
        select_parameters(resnet, (text,), "trainable")
    assert caught.value.reason is reason


class Tied(nn.Module):
    """One weight under two names, and a parameter of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.first = nn.Linear(3, 3)
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.first(x)) * self.scale


def test_a_tied_parameter_comes_once_by_its_first_name() -> None:
    model = Tied()
    assert select_parameters(model, ("last",), "trainable") == ("first.weight", "last.bias")
    assert select_parameters(model, ("**",), "trainable") == tuple(n for n, _ in model.named_parameters())
    assert select_parameters(model, ("scale",), "trainable") == ("scale",)
    assert select_parameters(model, ("*",), "trainable") == tuple(n for n, _ in model.named_parameters())


def test_names_alone_are_enough_for_all_but_classes() -> None:
    names = Names.of_parameters(["body.0.weight", "body.0.bias", "fc.weight"])
    assert select_names(names, ("body.*",), "x") == ("body.0.weight", "body.0.bias")
    assert select_names(names, ("body", "fc.weight"), "x") == ("body.0.weight", "body.0.bias", "fc.weight")


def test_modules_are_selected_in_their_order(resnet: nn.Module) -> None:
    assert select_modules(resnet, ("layer4", "layer1"), "x") == ("layer1", "layer4")
    assert select_modules(resnet, ("*:Linear",), "x") == ("fc",)
    with pytest.raises(ServiceError, match="matches no module"):
        select_modules(resnet, ("fc.weight",), "x")


def test_a_new_head_is_always_trained_and_everything_where_nothing_is_said(resnet: nn.Module) -> None:
    assert trained_parameters(resnet, (), "fc") == tuple(name for name, _ in resnet.named_parameters())
    assert trained_parameters(resnet, ("layer4",), "fc") == _starting(resnet, "layer4.", "fc.")
    assert trained_parameters(resnet, ("layer4",)) == _starting(resnet, "layer4.")


def test_whole_numbers_are_not_trained() -> None:
    model = nn.Module()
    model.steps = nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    model.weight = nn.Parameter(torch.zeros(2))
    assert trained_parameters(model, ()) == ("weight",)


class Spectral(nn.Module):
    """Has a complex parameter beside those of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
        self.fc = nn.Linear(3, 3)


def test_a_selector_of_complex_parameters_alone_is_refused() -> None:
    with pytest.raises(ServiceError, match="complex64, and only floating-point ones are trained") as caught:
        trained_parameters(Spectral(), ("fc", "filter"))
    assert caught.value.reason is ErrorReason.UNKNOWN_PARAMETER
    assert "trainable[1]" in caught.value.message
    for selectors in ((), ("**",)):
        assert trained_parameters(Spectral(), selectors) == ("fc.weight", "fc.bias")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fc", False),
        ("fc.*", False),
        ("fc/param_grad(weight)", False),
        ("fc/grad_out", True),
        ("fc/grad_in", True),
    ],
)
def test_a_gradient_port_means_a_value(text: str, expected: bool) -> None:
    assert is_of_values(text) is expected
