from pathlib import Path

import pytest

from tests.unit.models.conftest import reason_of
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.spec import (
    ModelSpec,
    PreprocessingSpec,
    WeightsKind,
    parse_model_argument,
    parse_model_arguments,
)

BAD_IDS = [
    "", "..", ".", "a/b", "../a", "a\\b", "/etc/passwd", "-rf", "_a", ".hidden", "A", "Resnet18", "a b",
    "a\n", "a\x00", "\na", "a:b", "a;b", "a$b", "%2e%2e", "\u00e9", "a\u202eb", "\u0663", "\uff41", "a" * 64,
    "~", "*", "a*", "a?", "{a}", "'a'",
]  # fmt: skip


@pytest.mark.parametrize("model_id", BAD_IDS)
def test_an_id_that_could_be_something_else_is_refused(model_id: str) -> None:
    with pytest.raises(ServiceError) as error:
        ModelSpec(model_id, "resnet18")
    assert reason_of(error) is ErrorReason.MODEL_INVALID


@pytest.mark.parametrize("model_id", ["a", "0", "vit_b_16", "my-model.v2", "a" * 63])
def test_an_id_within_the_rule_is_taken(model_id: str) -> None:
    assert ModelSpec(model_id, "resnet18").model_id == model_id


@pytest.mark.parametrize(
    ("text", "weights", "kind"),
    [
        ("resnet18", "DEFAULT", WeightsKind.NAMED),
        ("resnet18=IMAGENET1K_V1", "IMAGENET1K_V1", WeightsKind.NAMED),
        ("resnet18=random", "random", WeightsKind.RANDOM),
        ("resnet18=random:7", "random:7", WeightsKind.RANDOM),
        ("resnet18=/data/a=b.safetensors", "/data/a=b.safetensors", WeightsKind.FILE),
        ("resnet18=random.safetensors", str(Path.cwd() / "random.safetensors"), WeightsKind.FILE),
    ],
)
def test_a_command_line_argument_names_architecture_and_weights(
    text: str, weights: str, kind: WeightsKind
) -> None:
    spec = parse_model_argument(text)
    assert (spec.model_id, spec.architecture, spec.weights) == ("resnet18", "resnet18", weights)
    assert spec.weights_kind is kind


def test_random_without_a_seed_is_seed_zero() -> None:
    assert parse_model_argument("resnet18=random").seed == 0
    assert parse_model_argument("resnet18=random:7").seed == 7


@pytest.mark.parametrize(
    "weights", ["random:", "random:x", "random:-1", "random:1.5", "random:٣", "randomly"]
)
def test_a_seed_that_is_no_whole_number_is_refused(weights: str) -> None:
    with pytest.raises(ServiceError, match="seed") as error:
        ModelSpec("a", "resnet18", weights)
    assert reason_of(error) is ErrorReason.UNKNOWN_WEIGHTS


def test_an_argument_without_weights_after_the_sign_is_refused() -> None:
    with pytest.raises(ServiceError, match="has no weights"):
        parse_model_argument("resnet18=")


@pytest.mark.parametrize("factory", [":f", "m:", "m:f()", "m:f:g", "../m:f", "m:.f"])
def test_a_factory_that_is_no_module_and_callable_is_refused(factory: str) -> None:
    with pytest.raises(ServiceError, match="module:callable"):
        ModelSpec("a", factory)


def test_two_models_of_one_id_are_refused_with_another_id() -> None:
    assert list(parse_model_arguments(["resnet18", "b=timm:resnet18", "resnet18"])) == ["resnet18", "b"]
    with pytest.raises(ServiceError, match=r"would be 'resnet18'; write other=timm:resnet18 ") as error:
        parse_model_arguments(["resnet18", "timm:resnet18"])
    assert reason_of(error) is ErrorReason.MODEL_INVALID


def test_a_factory_may_name_a_method_of_a_class() -> None:
    assert ModelSpec("a", "package.module:Class.from_name", arguments=("x",)).is_custom


def test_torchvision_builders_take_no_positional_arguments() -> None:
    with pytest.raises(ServiceError, match="use options"):
        ModelSpec("a", "resnet18", arguments=(1,))


@pytest.mark.parametrize(
    "values",
    [
        {"resize": (1, 2, 3)},
        {"crop": (0,)},
        {"mean": (0.5,), "std": (0.5,)},
        {"mean": (0.5,) * 3},
        {"mean": (0.5,) * 3, "std": (0.0, 1.0, 1.0)},
        {"interpolation": "magic"},
    ],
)
def test_a_preprocessing_that_cannot_work_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ServiceError) as error:
        PreprocessingSpec(**values)  # type: ignore[arg-type]  # wrong on purpose
    assert reason_of(error) is ErrorReason.MODEL_INVALID


@pytest.mark.parametrize("stage", ["", "a.b", "stage 1", "1st", "a/in", "x" * 64, "re:"])
def test_a_stage_name_that_a_selector_could_not_say_is_refused(stage: str) -> None:
    with pytest.raises(ServiceError, match="stage name"):
        ModelSpec("a", "resnet18", stages={stage: "conv1"})
