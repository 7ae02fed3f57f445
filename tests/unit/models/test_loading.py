from pathlib import Path

import pytest
import torch
from torchvision.models import ViT_H_14_Weights

from tests.unit.models.conftest import CPU, load
from trocar_server.models.families import Family
from trocar_server.models.loading import choose_input_shape, load_model, typical_weights
from trocar_server.models.spec import ModelSpec, PreprocessingSpec

FACTORIES = "tests.unit.models.factories"


@pytest.mark.parametrize(
    "name",
    [
        "squeezenet1_1",
        "quantized_resnet18",
        "lraspp_mobilenet_v3_large",
        "ssdlite320_mobilenet_v3_large",
        "raft_small",
    ],
)
def test_a_model_of_each_family_runs_on_its_example(name: str) -> None:
    hosted = load(f"{name}=random:0")
    with torch.inference_mode():
        assert hosted.module(*hosted.example_inputs()) is not None


def test_a_video_model_runs_on_its_example() -> None:
    hosted = load("r3d_18=random:0")
    assert (hosted.input_shape, hosted.preprocessing) == ((3, 16, 112, 112), None)
    with torch.inference_mode():
        assert hosted.module(*hosted.example_inputs()).shape == (1, 400)


def test_what_is_known_of_a_model() -> None:
    hosted = load("resnet18=random:7")
    assert (hosted.weights, hosted.family, hosted.categories) == ("random:7", Family.CLASSIFICATION, ())
    assert (hosted.device, hosted.dtype, hosted.input_shape) == (CPU, torch.float32, (3, 224, 224))
    assert hosted.parameter_count == 11_689_512
    assert (
        hosted.byte_count == (11_689_512 + 9_600) * 4 + 20 * 8
    )  # parameters, running statistics, batch counts


def test_a_loaded_model_is_ready_for_inference() -> None:
    module = load("resnet18=random:7").module
    assert not any(part.training for part in module.modules())
    assert not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize(
    ("family", "meta", "crop", "shape"),
    [
        (Family.CLASSIFICATION, {}, (299, 299), (3, 299, 299)),
        (Family.SEGMENTATION, {}, (), (3, 224, 224)),
        (Family.VIDEO, {"min_temporal_size": 14}, (224, 224), (3, 16, 224, 224)),
        (Family.VIDEO, {"min_temporal_size": 32}, (112, 112), (3, 32, 112, 112)),
        (Family.OPTICAL_FLOW, {}, (), (3, 128, 128)),
        (Family.CUSTOM, {}, (), (3, 224, 224)),
    ],
)
def test_the_example_has_the_size_that_the_family_wants(
    family: Family, meta: dict[str, int], crop: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    assert choose_input_shape(family, meta, crop) == shape


def test_a_model_without_weights_gets_the_preprocessing_of_its_own_image_size() -> None:
    module = torch.nn.Identity()
    module.image_size = 224  # type: ignore[assignment]  # as vit_h_14 without weights
    assert typical_weights("vit_h_14", module) is ViT_H_14_Weights.IMAGENET1K_SWAG_LINEAR_V1
    module.image_size = 518  # type: ignore[assignment]
    assert typical_weights("vit_h_14", module) is ViT_H_14_Weights.IMAGENET1K_SWAG_E2E_V1


def test_an_operator_may_say_everything_about_a_custom_model() -> None:
    spec = ModelSpec(
        "tiny",
        f"{FACTORIES}:Net",
        categories=("a", "b", "c"),
        preprocessing=PreprocessingSpec(resize=(10,), crop=(8,)),
    )
    hosted = load_model(spec, CPU, Path("unused"))
    assert (hosted.family, hosted.weights, hosted.categories) == (Family.CUSTOM, "factory", ("a", "b", "c"))
    assert hosted.input_shape == (3, 8, 8)
    assert hosted.module(*hosted.example_inputs(2)).shape == (2, 3)


def test_an_operators_input_shape_wins() -> None:
    hosted = load_model(ModelSpec("a", "resnet18", "random", input_shape=(3, 64, 64)), CPU, Path("unused"))
    assert hosted.input_shape == (3, 64, 64)


def test_a_factory_without_preprocessing_takes_arrays_only() -> None:
    assert load_model(ModelSpec("a", f"{FACTORIES}:Net"), CPU, Path("unused")).preprocessing is None
