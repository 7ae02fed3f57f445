"""Suggestions for selectors that match nothing: the likely meaning, written as it has to be."""

import pytest
import torch
from torch import nn
from torchvision.models import resnet18

from tests.unit.surgery.recordings import recorded
from trocar_server.errors import ServiceError
from trocar_server.surgery import parse_selector, resolve

RESNET = recorded(resnet18, (1, 3, 32, 32))


class Blocks(nn.Module):
    """Blocks in a list, which is never called, and a dictionary of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(12))
        self.heads = nn.ModuleDict({"left": nn.Linear(4, 2), "right": nn.Linear(4, 2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        left: torch.Tensor = self.heads["left"](x)
        return left


BLOCKS = recorded(Blocks, (1, 4))


def message(selector: str) -> str:
    with pytest.raises(ServiceError) as caught:
        resolve([parse_selector(selector)], RESNET)
    return caught.value.message


@pytest.mark.parametrize(
    ("selector", "meant"),
    [
        ("fc.weight", "fc/param(weight)"),
        ("layer1.0.conv1.weight", "layer1.0.conv1/param(weight)"),
        ("bn1.running_mean", "bn1/param(running_mean)"),
        ("layer4.output", "layer4/out"),
        ("fc.input", "fc/in"),
        ("layer[34]", "re:layer[34]"),
        ("layer?", "re:layer."),
        ("layer{1,2}", "re:layer(1|2)"),
        ("layer(3|4)", "re:layer(3|4)"),
        ("layer\\d", "re:layer\\d"),
        ("layer4:mean", "trocar.tap('layer4', stats=['mean'])"),
        ("layer4:STD", "trocar.tap('layer4', stats=['std'])"),
        ("layer4.mean", "trocar.tap('layer4', stats=['mean'])"),
        ("layer4:avg", "trocar.tap('layer4', reduce=trocar.pool('avg'))"),
    ],
)
def test_the_likely_meaning_is_written_as_a_selector(selector: str, meant: str) -> None:
    assert meant in message(selector)


@pytest.mark.parametrize("meant", ["fc/param(weight)", "bn1/param(running_mean)", "fc/in", "re:layer[34]"])
def test_a_suggested_selector_is_valid(meant: str) -> None:
    (values,) = resolve([parse_selector(meant)], RESNET)
    assert values


@pytest.mark.parametrize(
    ("selector", "nearest"),
    [
        ("model.layer4", "layer4"),
        ("module.backbone.layer4.1", "layer4.1"),
        ("Layer4", "layer4"),
        ("FC", "fc"),
        ("downsample.0", "layer2.0.downsample.0, layer3.0.downsample.0, layer4.0.downsample.0"),
        ("layr4", "layer4, layer3, layer2"),
    ],
)
def test_a_name_with_other_names_before_it_or_in_other_case_is_nearest(selector: str, nearest: str) -> None:
    assert message(selector) == f"no module '{selector}'; nearest: {nearest}"


def test_a_class_that_a_module_does_not_have_still_names_its_classes() -> None:
    assert "the modules of that path are Sequential" in message("layer4:Conv2d")


@pytest.mark.parametrize(
    ("selector", "inside"),
    [
        ("blocks", "modules inside it that run: 'blocks.0' to 'blocks.11'"),
        ("heads", "modules inside it that run: heads.left"),
    ],
)
def test_a_container_that_is_not_called_names_what_runs_inside_it(selector: str, inside: str) -> None:
    with pytest.raises(ServiceError, match="the forward pass never calls it") as caught:
        resolve([parse_selector(selector)], BLOCKS)
    assert caught.value.message.endswith(inside)


def test_a_module_that_is_not_called_and_holds_no_other_names_modules_that_run() -> None:
    with pytest.raises(ServiceError, match=r"those that run: .*heads\.left"):
        resolve([parse_selector("heads.right")], BLOCKS)


def test_a_set_of_letters_in_brackets_names_regular_expressions() -> None:
    assert "begins with `re:`" in message("layer[a-c]")
