"""What `connect("local", models=...)` may be given."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.app.local_models import read_models
from trocar_server.errors import ServiceError


def test_names_are_read_as_on_the_command_line() -> None:
    found = read_models(["resnet18", "vit_b_16=random:7"])
    assert found.tables == {"resnet18": {"weights": "DEFAULT"}, "vit_b_16": {"weights": "random:7"}}
    assert found.factories == {}


def test_one_name_is_one_model() -> None:
    assert list(read_models("resnet18=random:0").tables) == ["resnet18"]


class ResNet18(nn.Module):
    """Its id would be that of torchvision's."""


@pytest.mark.parametrize(
    ("models", "advice"),
    [
        (["resnet18", "timm:resnet18"], "write other=timm:resnet18 "),
        (["resnet18", "resnet18=random:0"], "write other=torchvision:resnet18=random:0 "),
        (["hf:/runs/a/best", "hf:/runs/b/best=random:1"], "write other=hf:/runs/b/best=random:1 "),
        ([ResNet18(), "resnet18"], "write other=torchvision:resnet18 "),
    ],
)
def test_two_models_of_one_id_are_refused(models: list[Any], advice: str) -> None:
    with pytest.raises(ServiceError, match=f"two models would be '.*'; {re.escape(advice)}") as caught:
        read_models(models)
    assert caught.value.reason is ErrorReason.MODEL_INVALID


def test_a_model_that_is_named_twice_is_one() -> None:
    assert list(read_models(["resnet18", "resnet18"]).tables) == ["resnet18"]


def test_a_text_names_the_weights() -> None:
    assert read_models({"m": "random:1"}).tables == {"m": {"weights": "random:1"}}


def test_a_table_stays_as_it_is() -> None:
    table = {"factory": "a:b", "weights": "x.safetensors"}
    assert read_models({"m": table}).tables == {"m": table}


@pytest.mark.parametrize("with_table", [False, True])
def test_a_module_becomes_a_factory_of_its_copy(with_table: bool) -> None:
    net = nn.Linear(3, 2)
    given: Any = {"module": net, "input_shape": (3,)} if with_table else net
    found = read_models({"m": given})
    made = found.factories["m"]()
    assert made is not net
    assert torch.equal(made.get_parameter("weight"), net.weight)
    assert "module" not in found.tables["m"]
    assert found.tables["m"].get("input_shape") == ((3,) if with_table else None)


def test_what_was_given_is_not_changed() -> None:
    table = {"module": nn.Identity(), "input_shape": (3,)}
    read_models({"m": table})
    assert list(table) == ["module", "input_shape"]


@pytest.mark.parametrize("key", ["weights", "architecture", "factory", "arguments", "options", "colour"])
def test_what_would_build_another_model_cannot_go_with_a_module(key: str) -> None:
    with pytest.raises(ServiceError, match=f"'m': {key} cannot go with a module; input_shape, ") as caught:
        read_models({"m": {"module": nn.Identity(), key: "x"}})
    assert caught.value.reason is ErrorReason.MODEL_INVALID


@pytest.mark.parametrize("value", [None, 7, 1.5, [nn.Identity()], nn.Linear, {"module": nn.Linear}])
def test_what_is_no_model_is_refused(value: object) -> None:
    with pytest.raises(ServiceError, match="'m'") as caught:
        read_models({"m": value})
    assert caught.value.reason is ErrorReason.MODEL_INVALID
