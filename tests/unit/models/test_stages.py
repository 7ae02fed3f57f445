"""Stages of torchvision's families: where they are, against the sizes that a pass has there."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from torchvision.models import list_models

from tests.support.models.stages import SIDE, recorded_by_name, stage_leaves
from trocar_server.models import HostedModel, ModelSpec, stages_for
from trocar_server.models.stages import stages_of

CONVOLUTIONAL = [
    *("alexnet", "convnext_tiny", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "efficientnet_v2_m"),
    *("googlenet", "maxvit_t", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_large", "mobilenet_v3_small"),
    *("quantized_resnet18", "quantized_shufflenet_v2_x0_5", "regnet_y_400mf", "resnet18", "resnext50_32x4d"),
    *(
        "shufflenet_v2_x0_5",
        "squeezenet1_0",
        "squeezenet1_1",
        "vgg11",
        "vgg13_bn",
        "vgg19",
        "wide_resnet50_2",
    ),
    *("inception_v3", "s3d"),
]
CHANNELS_LAST = ["swin_t", "swin_v2_t", "swin3d_t"]
WITHOUT = {"raft_large", "raft_small", "ssd300_vgg16", "ssdlite320_mobilenet_v3_large"}
STRIDES = (4, 8, 16, 32)


def numbered(architecture: str) -> list[tuple[int, ...]]:
    """Return the shapes of the stages with a number, in order, after checking those of the others."""
    leaves = stage_leaves(recorded_by_name(architecture))
    shapes = {stage: leaf.shape or () for stage, leaf in leaves.items() if not stage.startswith("layer[")}
    assert list(shapes) == ["stem", *(f"stage{i}" for i in range(1, len(shapes) - 2)), "penultimate", "head"]
    return [shape for stage, shape in shapes.items() if stage.startswith("stage")]


@pytest.mark.parametrize("architecture", CONVOLUTIONAL)
def test_each_stage_is_half_as_high_and_wide_as_the_one_before(architecture: str) -> None:
    for shape, stride in zip(numbered(architecture), STRIDES, strict=False):
        for side in shape[-2:]:
            # Without padding, and with pooling that rounds down, a side is up to 30 % shorter.
            assert 0.7 * SIDE / stride <= side <= SIDE / stride


@pytest.mark.parametrize("architecture", CHANNELS_LAST)
def test_stages_of_a_windowed_transformer_have_channels_last(architecture: str) -> None:
    shapes = numbered(architecture)
    assert [shape[-3:-1] for shape in shapes] == [(SIDE // stride,) * 2 for stride in STRIDES]


def test_stages_of_a_vision_transformer_are_quarters_of_its_blocks() -> None:
    assert numbered("vit_b_32") == [(1, 50, 768)] * 4
    assert [stages_of("vit_l_16")[f"stage{i}"][-2:] for i in (1, 2, 3, 4)] == ["_5", "11", "17", "23"]
    blocks = [place for stage, place in stages_of("vit_b_32").items() if stage.startswith("layer[")]
    assert blocks == [f"encoder.layers.encoder_layer_{index}" for index in range(12)]


def test_stages_of_a_multiscale_transformer_have_a_quarter_of_the_tokens_before() -> None:
    assert [shape[1] - 1 for shape in numbered("mvit_v2_s")] == [
        8 * (SIDE // stride) ** 2 for stride in STRIDES
    ]


@pytest.mark.parametrize("architecture", ["r3d_18", "mc3_18", "r2plus1d_18"])
def test_stages_of_a_video_resnet_begin_at_half_the_size(architecture: str) -> None:
    assert [shape[-1] for shape in numbered(architecture)] == [112, 56, 28, 14]


@pytest.mark.parametrize(
    ("architecture", "sides"),
    [
        ("fcn_resnet50", [56, 28, 28, 28]),
        ("deeplabv3_resnet50", [56, 28, 28, 28]),
        ("deeplabv3_mobilenet_v3_large", [56, 28, 14, 14]),
    ],
)
def test_stages_of_a_segmentation_model_are_dilated(architecture: str, sides: list[int]) -> None:
    assert [shape[-1] for shape in numbered(architecture)] == sides


def test_a_sum_of_two_heads_has_no_penultimate() -> None:
    leaves = stage_leaves(recorded_by_name("lraspp_mobilenet_v3_large"))
    assert "penultimate" not in leaves
    assert leaves["head"].shape == (1, 21, 28, 28)


@pytest.mark.parametrize(
    "architecture", ["resnet18", "vgg11", "vit_b_32", "swin_t", "mobilenet_v2", "maxvit_t"]
)
def test_the_head_is_the_last_linear_layer_and_the_penultimate_its_input(architecture: str) -> None:
    recording = recorded_by_name(architecture)
    leaves = stage_leaves(recording)
    head = recording.modules[recording.stages["head"]]
    assert head.type_name == "Linear"
    assert leaves["head"].shape == (1, 1000)
    assert leaves["penultimate"].shape == (1, head.parameters["weight"].shape[1])  # type: ignore[index]
    assert leaves["head"].dtype == torch.float32


def test_every_architecture_has_stages_but_those_without_such_a_layout() -> None:
    assert {name for name in list_models() if not stages_of(name)} == WITHOUT


def test_what_is_no_architecture_has_no_stages() -> None:
    for name in ("", "vgg", "vgg12", "vit_z_16", "resne", "my.module:build"):
        assert stages_of(name) == {}


def _model(spec: ModelSpec) -> HostedModel:
    """A model of which only the spec counts here."""
    return cast(HostedModel, SimpleNamespace(spec=spec, stages={}))


def test_an_operators_stages_come_before_those_of_the_architecture() -> None:
    spec = ModelSpec("m", "resnet18", stages={"stem": "relu", "edges": "conv1"})
    assert stages_for(_model(spec)) == {**stages_of("resnet18"), "stem": "relu", "edges": "conv1"}


def test_a_factory_has_the_stages_that_its_operator_names() -> None:
    assert stages_for(_model(ModelSpec("m", "resnet18:build"))) == {}
    assert stages_for(_model(ModelSpec("m", "resnet18:build", stages={"head": "fc"}))) == {"head": "fc"}
