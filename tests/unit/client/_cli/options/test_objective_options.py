"""`--of` and `--labels`: what they stand for, with classes by number and by name."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import trocar
from tests.unit.client._cli.surgery_client import SurgeryClient
from trocar._base.tensors import Array
from trocar._cli.options.objective_options import Wanted, read_objective


def read(of: str | None, labels: str | None = None, client: SurgeryClient | None = None) -> Wanted:
    given: Any = client or SurgeryClient()
    return read_objective(given, "m", ["x.jpg"], of, labels)


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        ("logit:2", trocar.logit(2)),
        ("logit:207", trocar.logit(207)),
        ("logit:0,3", trocar.logit([0, 3])),
        ("logit:goldfish", trocar.logit(1)),
        ("logit: Great White Shark ", trocar.logit(2)),
        ("logit:tench, tinca tinca", trocar.logit(0)),
        ("logit:goldfish,3", trocar.logit([1, 3])),
        ("prob:1", trocar.probability(1)),
        ("log_prob:1", trocar.log_probability(1)),
        ("sum:layer4", trocar.value("layer4")),
        ("mean:/out", trocar.value("/out", reduce="mean")),
        ("norm:re:layer4", trocar.value("re:layer4", reduce="norm")),
    ],
)
def test_the_words_are_the_objective(of: str, expected: trocar.Objective) -> None:
    assert read(of).objective == expected


@pytest.mark.parametrize("of", [None, "logit", "logit:"])
def test_the_predicted_class_of_each_image_is_taken(of: str | None) -> None:
    found = read(of, client=SurgeryClient(scores=np.array([[0.0, 3, 1, -9], [7, 3, 1, 5]])))
    assert found.objective == trocar.logit([1, 0])
    assert found.text == "logit([1, 0]) (goldfish, tench, Tinca tinca)"


def test_the_class_is_predicted_with_the_adapter() -> None:
    given: Any = SurgeryClient()
    read_objective(given, "m", ["x.jpg"], None, None, adapter="style")
    assert given.calls[0] == ("extract", {"inputs": ["x.jpg"], "adapter": "style"})


def test_one_predicted_class_is_one_class() -> None:
    assert read(None, client=SurgeryClient(scores=np.array([[0.0, 3]]))).objective == trocar.logit(1)
    assert read("prob", client=SurgeryClient(scores=np.array([[0.0, 3]]))).objective == trocar.probability(1)


def test_names_of_classes_are_shown_where_they_were_looked_up() -> None:
    assert read("logit:goldfish").text == "logit(1) (goldfish)"
    client = SurgeryClient()
    assert read("logit:1", client=client).text == "logit(1)"
    assert client.calls == []


@pytest.mark.parametrize(
    ("of", "labels", "expected"),
    [
        ("loss:cross_entropy", "1,0", trocar.loss("cross_entropy", [1, 0])),
        ("loss:cross_entropy", "goldfish, 0", trocar.loss("cross_entropy", [1, 0])),
        ("loss:nll", "2", trocar.loss("nll", [2])),
        ("loss:mse", "0.5,-1e3", trocar.loss("mse", np.array([0.5, -1e3], np.float32))),
    ],
)
def test_losses_have_labels(of: str, labels: str, expected: trocar.Objective) -> None:
    assert read(of, labels).objective == expected


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_labels_come_from_a_file(tmp_path: Path, dtype: Any) -> None:
    labels = np.array([[1, 0], [0, 1]], dtype)
    np.save(tmp_path / "labels.npy", labels)
    assert read("loss:mse", str(tmp_path / "labels.npy")).objective == trocar.loss("mse", labels)


@pytest.mark.parametrize(
    ("of", "labels", "message"),
    [
        ("lgit:3", None, "no 'lgit'; did you mean logit"),
        ("", None, "no ''; available: logit"),
        ("3", None, "no '3'; available: logit"),
        ("logit:goldfsh", None, "no class 'goldfsh'; nearest: goldfish"),
        ("logit:crane", None, "several classes 'crane': 3, 4; give the number"),
        ("logit:-1", None, "no class '-1'"),
        ("logit:1,,2", None, "no class ''"),
        ("logit:3", "1", "--labels needs --of loss:NAME"),
        (None, "1", "--labels needs --of loss:NAME"),
        ("loss:cross_entropy", None, "needs --labels"),
        ("loss:crossentropy", "1", "no loss 'crossentropy'; did you mean cross_entropy"),
        ("loss:mse", "a,b", "not numbers"),
        ("loss:mse", "nan", "finite"),
        ("loss:nll", "0.5", "no class '0.5'"),
        ("loss:mse", "no.npy", "No such file"),
        ("norm:", None, "selector is empty"),
    ],
)
def test_what_is_no_objective_is_a_usage_error(of: str | None, labels: str | None, message: str) -> None:
    with pytest.raises(typer.BadParameter, match="--") as caught:
        read(of, labels)
    assert message in caught.value.message


def test_names_need_a_model_that_has_them() -> None:
    with pytest.raises(typer.BadParameter, match="the classes of m have no names on the server"):
        read("logit:goldfish", client=SurgeryClient(categories=()))


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        (np.zeros((1, 4, 8, 8)), r"not \(images, classes\)"),
        (np.zeros((2, 0)), r"not \(images, classes\)"),
        (np.array([[0.0, np.nan]]), "holds NaN"),
        (None, r"not \(images, classes\)"),
    ],
)
def test_a_class_is_predicted_from_scores_only(scores: Array | None, message: str) -> None:
    with pytest.raises(typer.BadParameter, match=message):
        read(None, client=SurgeryClient(scores=scores))
