import pytest

from tests.unit.models.conftest import reason_of
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.architectures import (
    architecture_names,
    check_spec,
    default_categories,
    find_builder,
    find_weights,
    named_weights,
    weights_label,
)
from trocar_server.models.spec import ModelSpec


def test_an_unknown_architecture_is_refused_with_the_nearest_names() -> None:
    with pytest.raises(ServiceError, match=r"no architecture 'resnt18'; nearest: .*resnet18") as error:
        find_builder("resnt18")
    assert reason_of(error) is ErrorReason.UNKNOWN_ARCHITECTURE


@pytest.mark.parametrize("name", ["ResNet18", "resnet18 ", "torchvision.models.resnet18", ""])
def test_an_architecture_is_named_exactly(name: str) -> None:
    with pytest.raises(ServiceError):
        find_builder(name)


@pytest.mark.parametrize("architecture", architecture_names())
def test_every_architecture_has_default_weights_that_safetensors_can_hold(architecture: str) -> None:
    members = named_weights(architecture)
    assert next(iter(members)) == "DEFAULT"
    assert not any("backend" in member.meta for member in members.values())


def test_unknown_weights_are_refused_with_what_there_is() -> None:
    with pytest.raises(ServiceError, match=r"IMAGENET1K_V1, IMAGENET1K_V2, random\[:seed\]") as error:
        find_weights("resnet50", "IMAGENET1K_V3")
    assert reason_of(error) is ErrorReason.UNKNOWN_WEIGHTS


def test_quantized_weights_are_refused_with_the_reason() -> None:
    with pytest.raises(ServiceError, match="quantized weights do not fit into safetensors"):
        find_weights("quantized_resnet18", "IMAGENET1K_FBGEMM_V1")


def test_a_pickle_as_weights_is_answered_with_the_way_to_convert_it_and_no_path() -> None:
    with pytest.raises(ServiceError, match="trocar admin convert") as error:
        find_weights("resnet18", "/home/me/model.pth")
    assert "/home" not in error.value.message
    assert "'model.pth'" in error.value.message


@pytest.mark.parametrize(
    ("spec", "label"),
    [
        (ModelSpec("a", "resnet50"), "IMAGENET1K_V2"),
        (ModelSpec("a", "resnet50", "IMAGENET1K_V1"), "IMAGENET1K_V1"),
        (ModelSpec("a", "resnet50", "random"), "random:0"),
        (ModelSpec("a", "resnet50", "/secret/x.safetensors"), "file"),
        (ModelSpec("a", "module:factory"), "factory"),
        (ModelSpec("a", "module:factory", "random:3"), "random:3"),
    ],
)
def test_the_label_of_weights_names_their_source_and_no_path(spec: ModelSpec, label: str) -> None:
    assert weights_label(spec) == label


@pytest.mark.parametrize("option", ["weights", "weights_backbone", "quantize", "progress", "pretrained"])
def test_options_may_not_choose_the_weights(option: str) -> None:
    with pytest.raises(ServiceError, match=option) as error:
        check_spec(ModelSpec("a", "quantized_resnet18", "random", options={option: True}))
    assert reason_of(error) is ErrorReason.MODEL_INVALID


def test_a_factory_has_no_named_weights() -> None:
    with pytest.raises(ServiceError, match="no weights 'IMAGENET1K_V1'") as error:
        check_spec(ModelSpec("a", "module:factory", "IMAGENET1K_V1"))
    assert reason_of(error) is ErrorReason.UNKNOWN_WEIGHTS


def test_the_default_categories_are_those_of_the_default_weights() -> None:
    assert default_categories("resnet50")[285] == "Egyptian cat"
