"""Tracing: the names of torchvision, what is left behind, and what cannot be traced."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchvision.models import (
    mobilenet_v3_small,
    resnet18,
    shufflenet_v2_x0_5,
    squeezenet1_1,
    swin_t,
    vit_b_16,
)
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn
from torchvision.models.feature_extraction import create_feature_extractor, get_graph_node_names

from tests.support.models.tiny_models import DataDependent, Plain
from tests.support.servers.footprint import hook_count
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery.recording.graph import trace_graph


class MakesConstants(nn.Module):
    """Makes a tensor while it is traced, and keeps what it computed."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(3.0))
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> Any:
        self.last = x * (self.table + 1)  # `table` is no input, so this sum is done by the trace
        return self.last + torch.tensor([1.0, 2.0, 3.0])


def state(module: nn.Module) -> list[dict[str, Any]]:
    """Return every attribute of every module, tables of parameters and hooks included."""
    return [
        {name: dict(value) if isinstance(value, dict) else value for name, value in vars(part).items()}
        for part in module.modules()
    ]


def refusal(module: nn.Module) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        trace_graph(module)
    assert caught.value.reason is ErrorReason.NOT_TRACEABLE
    return caught.value


@pytest.mark.parametrize(
    "kind", [resnet18, squeezenet1_1, mobilenet_v3_small, shufflenet_v2_x0_5, swin_t, vit_b_16, Plain]
)
def test_names_are_those_of_torchvision_with_and_without_data(kind: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        model = kind()
    names = get_graph_node_names(copy.deepcopy(model), suppress_diff_warning=True)[1]
    assert list(trace_graph(model).names) == names


def test_the_graph_is_that_of_eval_mode_whatever_the_mode_is() -> None:
    class Modal(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin() if self.training else x.cos()

    assert trace_graph(Modal().train()).names == ("x", "cos")


@pytest.mark.parametrize("kind", [Plain, MakesConstants])
def test_tracing_leaves_the_model_as_it_was(kind: Callable[[], nn.Module]) -> None:
    model = kind()
    model.train()
    next(model.modules()).register_forward_hook(lambda *_: None)
    before = state(model)
    trace_graph(model)
    after = state(model)
    assert all(a.keys() == b.keys() for a, b in zip(after, before, strict=True))
    assert all(
        a[name] is b[name] or a[name] == b[name]
        for a, b in zip(after, before, strict=True)
        for name in a
        if not isinstance(a[name], dict)
    )
    assert [list(a["_modules"]) for a in after] == [list(b["_modules"]) for b in before]
    assert model.training


def test_a_failed_trace_leaves_the_model_as_it_was() -> None:
    model = DataDependent().train()
    refusal(model)
    assert model.training
    assert hook_count(model) == 0
    assert model(torch.ones(1, 3)).shape == (1, 3)


def test_what_is_made_during_the_trace_is_kept_beside_the_graph() -> None:
    model = MakesConstants()
    traced = trace_graph(model)
    values = sorted(traced.constants.values(), key=lambda value: float(value.sum()))
    assert len(values) == 2
    assert all(torch.equal(value, torch.tensor([1.0, 2.0, 3.0])) for value in values)
    assert not [name for name in vars(model) if name.startswith("_tensor_constant")]
    assert model.last is None


def test_hooks_on_modules_do_not_see_the_trace_of_leaves() -> None:
    model, seen = Plain(), []
    model.conv.register_forward_hook(lambda *call: seen.append(call))
    trace_graph(model)
    assert not seen
    assert hook_count(model) == 1


def test_modules_that_a_run_calls_are_known() -> None:
    called = trace_graph(resnet18()).called_modules
    assert {"conv1", "layer1.0.conv1", "fc"} <= called
    assert not {"", "layer1", "layer1.0"} & called


@pytest.mark.parametrize("query", ["layer1", "layer2.0", "layer4.1.relu", "fc", "x"])
def test_a_container_stands_for_the_node_that_torchvision_takes(query: str) -> None:
    torch.manual_seed(0)
    model = resnet18().eval()
    for part in model.modules():
        if isinstance(part, nn.ReLU):
            part.inplace = False
    node = trace_graph(model).truncated(query)
    assert node is not None
    both = create_feature_extractor(model, {query: "query"})
    exact = create_feature_extractor(model, {node: "node"})
    images = torch.rand(1, 3, 32, 32)
    assert torch.equal(both(images)["query"], exact(images)["node"])


@pytest.mark.parametrize("query", ["layer", "layer1.9", "", "layer1.0.relu_1.deeper"])
def test_a_name_that_contains_nothing_stands_for_nothing(query: str) -> None:
    assert trace_graph(resnet18()).truncated(query) is None


def test_a_model_whose_code_depends_on_its_data_cannot_be_traced() -> None:
    assert "select modules instead" in refusal(DataDependent()).message


def test_detection_cannot_be_traced_and_names_no_folder() -> None:
    with torch.device("meta"):
        model = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None)
    message = refusal(model).message
    assert "\n" not in message
    assert "/" not in message


def test_the_folders_of_the_machine_stay_out_of_the_message() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("cannot open /secret/folder/file.txt\nand more")

    message = refusal(Fails()).message
    assert "file.txt" in message
    assert "secret" not in message
    assert "and more" not in message


def test_a_model_that_changes_how_it_is_called_is_refused() -> None:
    """Tracing takes the forward of the class, and leaves hooks of the model itself out."""
    patched, hooked = Plain(), Plain()
    patched.forward = lambda x: x  # type: ignore[method-assign]
    hooked.register_forward_pre_hook(lambda _, args: (args[0] * 2,))
    refusal(patched)
    refusal(hooked)


def test_two_nodes_of_one_name_are_refused_as_torchvision_does() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"a+b": nn.Identity()})

        def forward(self, x: torch.Tensor) -> Any:
            return self.parts["a+b"](self.parts["a+b"](x))

    with pytest.raises(ValueError, match="duplicate"):
        create_feature_extractor(Odd(), ["parts"])
    refusal(Odd())
