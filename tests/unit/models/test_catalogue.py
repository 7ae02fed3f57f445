import pytest

from tests.unit.models.conftest import load, reason_of
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.catalogue import Catalogue, ModelState, client_spec
from trocar_server.models.spec import ModelSpec, parse_model_argument


@pytest.fixture
def catalogue() -> Catalogue:
    made = Catalogue()
    for spec in (
        parse_model_argument("resnet50"),
        parse_model_argument("resnet18=random:0"),
        ModelSpec("cats", "module:factory", "/secret/place/cats.safetensors"),
    ):
        made.add(spec)
    return made


def test_entries_are_ordered_by_id(catalogue: Catalogue) -> None:
    assert [entry.spec.model_id for entry in catalogue.entries()] == ["cats", "resnet18", "resnet50"]


def test_an_entry_is_described_before_it_is_loaded(catalogue: Catalogue) -> None:
    described = [(entry.state, entry.family, entry.weights) for entry in catalogue.entries()]
    assert described == [
        (ModelState.UNLOADED, "custom", "file"),
        (ModelState.UNLOADED, "classification", "random:0"),
        (ModelState.UNLOADED, "classification", "IMAGENET1K_V2"),
    ]


def test_an_unknown_id_is_answered_with_the_nearest(catalogue: Catalogue) -> None:
    with pytest.raises(ServiceError, match="no model 'resnet19'; nearest: resnet18, resnet50") as error:
        catalogue.get("resnet19")
    assert reason_of(error) is ErrorReason.UNKNOWN_MODEL


def test_an_id_like_no_other_is_answered_with_advice(catalogue: Catalogue) -> None:
    with pytest.raises(ServiceError, match="see `trocar models`"):
        catalogue.get("zzz")


def test_a_model_that_is_not_loaded_says_why(catalogue: Catalogue) -> None:
    catalogue.get("resnet50").state = ModelState.FAILED
    catalogue.get("resnet50").error_message = "no network"
    with pytest.raises(
        ServiceError, match="could not be loaded: no network; fix the cause, then load it again"
    ) as error:
        catalogue.loaded("resnet50")
    assert reason_of(error) is ErrorReason.MODEL_NOT_LOADED


def test_a_loaded_model_is_returned(catalogue: Catalogue) -> None:
    catalogue.get("resnet18").hosted = hosted = load("resnet18=random:0")
    assert catalogue.loaded("resnet18") is hosted


def test_adding_the_same_model_again_changes_nothing(catalogue: Catalogue) -> None:
    entry = catalogue.get("resnet18")
    assert catalogue.add(parse_model_argument("resnet18=random")) is entry
    assert len(catalogue.entries()) == 3


@pytest.mark.parametrize(
    "spec",
    [
        ModelSpec("resnet18", "resnet18", "random:1"),
        ModelSpec("resnet18", "resnet34", "random:0"),
        ModelSpec("resnet18", "resnet18", "random:0", options={"num_classes": 2}),
        ModelSpec("cats", "module:factory", "/secret/place/dogs.safetensors"),
    ],
)
def test_another_model_under_the_same_id_is_a_conflict(catalogue: Catalogue, spec: ModelSpec) -> None:
    with pytest.raises(ServiceError) as error:
        catalogue.add(spec)
    assert reason_of(error) is ErrorReason.MODEL_CONFLICT


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (ModelSpec("resnt18", "resnt18"), ErrorReason.UNKNOWN_ARCHITECTURE),
        (ModelSpec("resnet34", "resnet34", "BEST"), ErrorReason.UNKNOWN_WEIGHTS),
        (ModelSpec("resnet34", "resnet34", options={"weights": "x"}), ErrorReason.MODEL_INVALID),
    ],
)
def test_a_spec_that_cannot_be_loaded_is_not_added(
    catalogue: Catalogue, spec: ModelSpec, reason: ErrorReason
) -> None:
    with pytest.raises(ServiceError) as error:
        catalogue.add(spec)
    assert reason_of(error) is reason
    assert len(catalogue.entries()) == 3


@pytest.mark.parametrize(
    ("model_id", "weights"),
    [
        ("resnet50", ""), ("resnet50", "DEFAULT"), ("resnet50", "IMAGENET1K_V2"), ("resnet18", "random"),
        ("cats", ""), ("cats", "file"),
    ],
)  # fmt: skip
def test_a_client_may_name_the_weights_that_an_entry_has(
    catalogue: Catalogue, model_id: str, weights: str
) -> None:
    assert catalogue.request(model_id, weights) is catalogue.get(model_id)


@pytest.mark.parametrize(
    ("model_id", "weights"),
    [
        ("resnet50", "IMAGENET1K_V1"),
        ("resnet50", "random:0"),
        ("resnet18", "DEFAULT"),
        ("cats", "DEFAULT"),
        ("cats", "x"),
    ],
)
def test_a_client_may_not_change_the_weights_of_an_entry(
    catalogue: Catalogue, model_id: str, weights: str
) -> None:
    with pytest.raises(ServiceError) as error:
        catalogue.request(model_id, weights)
    assert reason_of(error) is ErrorReason.MODEL_CONFLICT
    assert "/secret" not in error.value.message


def test_a_client_may_add_a_torchvision_model(catalogue: Catalogue) -> None:
    entry = catalogue.request("vit_b_16", "random:3")
    assert catalogue.get("vit_b_16") is entry
    assert catalogue.request("squeezenet1_1").spec.weights == "DEFAULT"


@pytest.mark.parametrize("state", ModelState)
def test_only_what_is_not_in_memory_is_forgotten(catalogue: Catalogue, state: ModelState) -> None:
    catalogue.get("cats").state = state
    if state in (ModelState.LOADED, ModelState.LOADING):
        with pytest.raises(ServiceError, match="unload it first"):
            catalogue.remove("cats")
        return
    catalogue.remove("cats")
    catalogue.add(parse_model_argument("squeezenet1_1"))
    with pytest.raises(ServiceError) as error:
        catalogue.remove("cats")
    assert reason_of(error) is ErrorReason.UNKNOWN_MODEL
    assert [entry.spec.model_id for entry in catalogue.entries()] == ["resnet18", "resnet50", "squeezenet1_1"]


@pytest.mark.parametrize(
    "weights",
    [
        "w.safetensors", "/etc/x.safetensors", "../x.safetensors", "~/x.safetensors", "file", "https://x/y.pth",
        "x.pth", "DEFAULT ", "default", "random:x", "random:-1", "random.safetensors", "\x00", "factory",
        "IMAGENET1K_V9",
    ],
)  # fmt: skip
def test_a_client_names_published_or_random_weights_only(weights: str) -> None:
    with pytest.raises(ServiceError) as error:
        client_spec("resnet18", weights)
    assert reason_of(error) is ErrorReason.UNKNOWN_WEIGHTS


@pytest.mark.parametrize(
    "model_id", ["os:system", "module:factory", "../resnet18", "resnet18\n", "", "RESNET18"]
)
def test_a_client_names_torchvisions_architectures_only(model_id: str) -> None:
    with pytest.raises(ServiceError) as error:
        client_spec(model_id, "random")
    assert reason_of(error) is ErrorReason.UNKNOWN_ARCHITECTURE
