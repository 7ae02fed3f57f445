import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torchvision.models import ResNet18_Weights, get_model, list_models, resnet18

from tests.unit.models.conftest import CPU, assert_same_state, load, reason_of
from tests.unit.models.factories import Net
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.architectures import find_builder, named_weights
from trocar_server.models.building import build, skip_state_dict, supply_state_dict, without_paths
from trocar_server.models.loading import load_model
from trocar_server.models.spec import ModelSpec, parse_model_argument
from trocar_server.models.weights.initial_values import no_initial_values
from trocar_server.models.weights.weights_file import StateDict, write_weights

ONE_OF_EACH_FAMILY = [
    "densenet121",
    "efficientnet_v2_s",
    "fasterrcnn_mobilenet_v3_large_fpn",
    "fcn_resnet50",
    "googlenet",
    "inception_v3",
    "maskrcnn_resnet50_fpn",
    "mnasnet0_5",
    "mobilenet_v3_large",
    "mvit_v1_b",
    "raft_small",
    "resnet50",
    "retinanet_resnet50_fpn",
    "shufflenet_v2_x0_5",
    "squeezenet1_0",
    "ssd300_vgg16",
    "swin_t",
    "vgg11_bn",
    "vit_b_16",
]
FACTORIES = "tests.unit.models.factories"


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "mobilenet_v3_small", "quantized_resnet18"])
def test_random_weights_are_what_anyone_gets_from_the_seed(name: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        theirs = get_model(name, weights=None).eval()
    assert_same_state(load(f"{name}=random:7").module, theirs)


@pytest.mark.parametrize("name", ["lraspp_mobilenet_v3_large", "ssdlite320_mobilenet_v3_large"])
def test_random_weights_have_a_random_backbone_too(name: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = get_model(name, weights=None, weights_backbone=None).eval()
    assert_same_state(load(f"{name}=random").module, theirs)


def test_building_leaves_the_global_generator_as_it_was() -> None:
    before = torch.get_rng_state()
    load("squeezenet1_1=random:3")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", list_models())
def test_every_architecture_builds_and_has_an_example(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name.startswith("regnet"):  # computes its widths with torch, which needs values
        for function in ("arange", "tensor"):
            monkeypatch.setattr(torch, function, partial(getattr(torch, function), device="cpu"))
    with torch.device("meta"), no_initial_values():  # half of the time goes into filling nothing
        hosted = load_model(parse_model_argument(f"{name}=random:0"), torch.device("meta"), Path("unused"))
    assert hosted.input_shape[0] == 3
    assert hosted.parameter_count > 100_000
    assert (hosted.preprocessing is None) == (hosted.family in ("video", "optical_flow"))


def test_options_reach_the_builder() -> None:
    module = build(ModelSpec("a", "resnet18", "random", options={"num_classes": 5}), Path("unused")).module
    assert module.get_parameter("fc.bias").shape == (5,)


def test_an_option_that_the_builder_does_not_know_is_told() -> None:
    with pytest.raises(ServiceError, match="unexpected keyword argument 'num_klasses'") as error:
        build(ModelSpec("a", "resnet18", "random", options={"num_klasses": 5}), Path("unused"))
    assert reason_of(error) is ErrorReason.MODEL_INVALID


def test_a_file_fills_the_model(tmp_path: Path) -> None:
    original = resnet18(weights=None, num_classes=5).eval()
    write_weights(original.state_dict(), tmp_path / "w.safetensors")
    spec = ModelSpec("a", "resnet18", str(tmp_path / "w.safetensors"), options={"num_classes": 5})
    hosted = load_model(spec, CPU, tmp_path)
    assert_same_state(hosted.module, original)
    assert (hosted.weights, hosted.categories) == ("file", ())


def test_a_file_that_does_not_fit_is_refused_with_its_keys(tmp_path: Path) -> None:
    write_weights(resnet18(weights=None, num_classes=5).state_dict(), tmp_path / "w.safetensors")
    with pytest.raises(
        ServiceError, match=r"2 wrong shape: fc\.bias \(5,\), the model has \(1000,\)"
    ) as error:
        load(f"resnet18={tmp_path}/w.safetensors")
    assert reason_of(error) is ErrorReason.WEIGHTS_MISMATCH
    assert str(tmp_path) not in error.value.message


def test_a_factory_is_called_with_arguments_and_options() -> None:
    spec = ModelSpec("a", f"{FACTORIES}:Net", arguments=(6,), options={"classes": 2})
    module = build(spec, Path("unused")).module
    assert module.get_parameter("head.weight").shape == (2, 6)


def test_a_factory_may_be_a_class_method() -> None:
    module = build(ModelSpec("a", f"{FACTORIES}:Net.wide"), Path("unused")).module
    assert module.get_parameter("head.weight").shape == (3, 8)


def test_a_factory_with_a_seed_can_be_rebuilt() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        theirs = Net()
    assert_same_state(build(ModelSpec("a", f"{FACTORIES}:Net", "random:3"), Path("unused")).module, theirs)


def test_a_factory_takes_a_file(tmp_path: Path) -> None:
    original = Net()
    write_weights(original.state_dict(), tmp_path / "w.safetensors")
    spec = ModelSpec("a", f"{FACTORIES}:Net", str(tmp_path / "w.safetensors"))
    assert_same_state(build(spec, tmp_path).module, original)


@pytest.mark.parametrize(
    ("factory", "cause"),
    [
        ("no_such_package_of_ours:f", "no module 'no_such_package_of_ours' can be imported"),
        (f"{FACTORIES}:absent", "has no 'absent'"),
        (f"{FACTORIES}:Net.absent", "has no 'absent'"),
        (f"{FACTORIES}:fails", "FileNotFoundError"),
        (f"{FACTORIES}:no_module", "not an nn.Module"),
        (f"{FACTORIES}:__doc__", "not callable"),
    ],
)
def test_a_factory_that_fails_is_told_with_its_cause(factory: str, cause: str) -> None:
    with pytest.raises(ServiceError, match=cause) as error:
        build(ModelSpec("a", factory), Path("unused"))
    assert reason_of(error) is ErrorReason.MODEL_INVALID
    assert "/home" not in error.value.message


def test_torchvision_is_as_it_was_after_the_builder_failed() -> None:
    original = ResNet18_Weights.get_state_dict
    with pytest.raises(ValueError, match="builder"), supply_state_dict(ResNet18_Weights.DEFAULT, StateDict()):
        raise ValueError("builder")
    assert ResNet18_Weights.get_state_dict is original


@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_an_architecture_built_for_weights_without_them_is_the_one_with_them(name: str) -> None:
    weights, builder = named_weights(name)["DEFAULT"], find_builder(name)
    auxiliary = {"aux_logits": True} if name in ("googlenet", "inception_v3") else {}
    with torch.device("meta"), no_initial_values(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with skip_state_dict(weights):
            empty = builder(weights=weights, progress=False)
            state: Any = builder(weights=weights, progress=False, **auxiliary).state_dict()
        with supply_state_dict(weights, state):  # as torchvision fills it in, strictly
            full = builder(weights=weights, progress=False)
    assert repr(empty) == repr(full)
    flags = ("transform_input", "aux_logits", "image_size", "training")
    assert [getattr(empty, flag, None) for flag in flags] == [getattr(full, flag, None) for flag in flags]


def test_others_load_state_dicts_as_ever_while_one_is_skipped() -> None:
    original = torch.nn.Module.load_state_dict
    source, target = Net(), Net()
    with skip_state_dict(ResNet18_Weights.DEFAULT):
        target.load_state_dict(source.state_dict())
        with pytest.raises(RuntimeError, match="Missing key"):
            Net().load_state_dict({})
    assert_same_state(target, source)
    with pytest.raises(ValueError, match="builder"), skip_state_dict(ResNet18_Weights.DEFAULT):
        raise ValueError("builder")
    assert torch.nn.Module.load_state_dict is original


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("no file '/home/me/a b/x.pth'", "no file 'x.pth'"),
        ("no file '/home/me/x.pth'", "no file 'x.pth'"),
        ("open ~/models/x.pth: denied", "open x.pth: denied"),
        (r"open C:\models\x.pth", "open x.pth"),
        ("shape (2, 3) / 4 and a/b", "shape (2, 3) / 4 and a/b"),
        ("see https://pytorch.org/docs/x", "see https://pytorch.org/docs/x"),
    ],
)
def test_paths_in_a_cause_are_shortened(text: str, short: str) -> None:
    assert without_paths(text) == short
