"""Which modules are in train mode, on real architectures."""

from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.model.modes import set_modes
from trocar_server.training.model.trained_parameters import select_parameters


def _model(name: str) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = torchvision.models.get_model(name).eval()
    return model


def _trains(model: nn.Module, selectors: tuple[str, ...], train_mode: tuple[str, ...] = ()) -> set[str]:
    """Set modes and return the paths in train mode."""
    set_modes(model, select_parameters(model, selectors, "trainable"), train_mode)
    return {path for path, part in model.named_modules() if part.training}


def test_a_whole_model_is_in_train_mode_as_torch_has_it() -> None:
    model = _model("resnet18")
    assert _trains(model, ("**",)) == {path for path, _ in model.named_modules()}


def test_of_a_resnet_with_a_trained_head_all_batch_norms_are_in_eval_mode() -> None:
    assert _trains(_model("resnet18"), ("fc",)) == {"", "fc", "relu", "maxpool", "avgpool"}


def test_a_trained_stage_is_in_train_mode_with_its_batch_norms() -> None:
    model = _model("resnet18")
    trained = _trains(model, ("layer4", "fc"))
    inside = {path for path, _ in model.named_modules() if path.startswith("layer4")}
    assert trained == {"", "fc", "relu", "maxpool", "avgpool"} | inside


def test_a_batch_norm_with_frozen_parameters_beside_trained_weights_is_in_eval_mode() -> None:
    trained = _trains(_model("resnet18"), ("layer4.*.conv1",))
    assert "layer4.0.conv1" in trained
    assert "layer4.0.relu" in trained
    assert not {path for path in trained if "bn" in path or "downsample" in path}


def test_dropout_of_frozen_blocks_is_in_eval_mode_and_that_of_trained_ones_is_not() -> None:
    trained = _trains(_model("vit_b_32"), ("encoder.layers.encoder_layer_11", "heads"))
    assert "encoder.layers.encoder_layer_11.dropout" in trained
    assert "encoder.layers.encoder_layer_11.mlp.4" in trained
    assert not {path for path in trained if path.startswith("encoder.layers.encoder_layer_0")}
    assert "encoder.dropout" in trained  # of the encoder, which holds the trained block


def test_with_a_trained_head_alone_no_dropout_of_the_encoder_acts() -> None:
    assert _trains(_model("vit_b_32"), ("heads",)) == {"", "heads", "heads.head"}


def test_stochastic_depth_acts_in_trained_blocks_only() -> None:
    model = _model("efficientnet_b0")
    trained = _trains(model, ("features.7", "classifier"))
    depths = {path for path in trained if type(model.get_submodule(path)).__name__ == "StochasticDepth"}
    assert depths == {"features.7.0.stochastic_depth"}
    assert {"classifier.0", "classifier.1", "features", "avgpool"} <= trained


def test_modules_can_be_put_in_train_mode_all_the_same() -> None:
    trained = _trains(_model("resnet18"), ("fc",), ("**:BatchNorm2d", "layer1"))
    assert {"bn1", "layer4.1.bn2", "layer1", "layer1.0.relu"} <= trained
    assert "layer2.0.relu" not in trained


def test_a_selector_of_modules_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ServiceError, match=r"train_mode\[0\]: 'layer9' matches no module; nearest") as caught:
        _trains(_model("resnet18"), ("fc",), ("layer9",))
    assert caught.value.reason is ErrorReason.UNKNOWN_MODULE


class Bare(nn.Module):
    """Batch norms without parameters: in the model itself, and in a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4, affine=False)
        self.part = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> Any:
        return self.part(self.norm(self.first(x)))


@pytest.mark.parametrize(
    ("selectors", "norms"),
    [
        (("**",), {"norm", "part.1"}),
        (("part",), {"part.1"}),
        (("part.2",), set()),
    ],
)
def test_running_statistics_without_parameters_move_only_where_nothing_is_frozen(
    selectors: tuple[str, ...], norms: set[str]
) -> None:
    assert {path for path in _trains(Bare(), selectors) if path in ("norm", "part.1")} == norms


def test_statistics_of_frozen_batch_norms_do_not_move() -> None:
    torch.manual_seed(0)
    model = torchvision.models.resnet18()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    set_modes(model, select_parameters(model, ("layer4", "fc"), "trainable"))
    model(torch.rand(2, 3, 32, 32))
    moved = {name for name, buffer in model.named_buffers() if not torch.equal(buffer, before[name])}
    assert moved
    assert all(name.startswith("layer4") for name in moved)
