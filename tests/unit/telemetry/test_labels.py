"""Label values stay few."""

from trocar_server.telemetry.labels import ModelLabels

KINDS = {"resnet18": "catalogue", "trainer-1": "guest", "trainer-2": "guest"}


def kind_of(model_id: str) -> str:
    return KINDS.get(model_id, "")


def test_a_model_of_the_catalogue_is_itself() -> None:
    assert ModelLabels(kind_of).of("resnet18") == "resnet18"


def test_all_trainers_are_one() -> None:
    labels = ModelLabels(kind_of)
    assert {labels.of("trainer-1"), labels.of("trainer-2")} == {"trainer"}


def test_what_is_not_there_has_no_label() -> None:
    labels = ModelLabels(kind_of)
    assert [labels.of(text) for text in ("", "absent", "x" * 10_000, "\n", "other")] == [""] * 5


def test_models_that_come_and_go_do_not_add_up() -> None:
    labels = ModelLabels(lambda model_id: "catalogue")
    found = {labels.of(f"model-{index}") for index in range(10_000)}
    assert len(found) == 257
    assert "other" in found
    assert labels.of("model-0") == "model-0"


def test_a_model_that_is_gone_keeps_its_label() -> None:
    present = {"resnet18"}
    labels = ModelLabels(lambda model_id: "catalogue" if model_id in present else "")
    assert labels.of("resnet18") == "resnet18"
    present.clear()
    assert labels.of("resnet18") == "resnet18"
