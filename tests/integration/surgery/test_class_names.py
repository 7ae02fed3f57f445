"""Classes of objectives by name, on every way: the numbers of the model's categories."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import trocar
from tests.support.models.tiny_models import Plain
from tests.support.oracles.oracle import noise
from tests.support.servers.running_server import running_server
from tests.support.servers.serving import custom
from trocar.errors import ObjectiveOutOfRangeError

X = noise(2, 3, 8, 8)
NAMES = ("Tabby", "dog", "crane", "crane", "cup, blue")
NAMED, NUMBERED = trocar.logit("tabby"), trocar.logit(0)


@pytest.fixture(scope="module")
def client() -> Iterator[trocar.Client]:
    models = {
        "named": custom(Plain, (3, 8, 8), categories=list(NAMES)),
        "plain": custom(Plain, (3, 8, 8)),
    }
    with running_server(models=models) as running, trocar.connect(running.address) as connected:
        yield connected


def gradients(client: trocar.Client, of: trocar.Objective) -> Any:
    return client.gradients("named", X, of=of, at=["conv", "/in"])


@pytest.mark.parametrize(
    ("named", "numbered"),
    [
        (NAMED, NUMBERED),
        (trocar.probability(["DOG", "cup, blue"]), trocar.probability([1, 4])),
        (2 * trocar.logit("dog") - NAMED, 2 * trocar.logit(1) - NUMBERED),
        (trocar.gradient_penalty(of=NAMED, at="conv"), trocar.gradient_penalty(of=NUMBERED, at="conv")),
    ],
    ids=["one", "each sample", "sum", "penalty"],
)
def test_a_name_is_its_number(
    client: trocar.Client, named: trocar.Objective, numbered: trocar.Objective
) -> None:
    maps, expected = gradients(client, named), gradients(client, numbered)
    assert [*maps] == [*expected]
    for name in maps:
        np.testing.assert_array_equal(maps[name], expected[name])
    assert maps.objective == expected.objective


def test_names_on_other_ways(client: trocar.Client) -> None:
    expected = gradients(client, NUMBERED)["conv"]
    taps = ["conv/grad_out"]
    with client.extract_stream("named", [X], taps, of=NAMED) as stream:
        np.testing.assert_array_equal(next(stream).unwrap()["conv/grad_out"], expected)
    with client.prepare("named", X, taps, of=NAMED) as prepared:
        np.testing.assert_array_equal(prepared(X)["conv/grad_out"], expected)
    assert "conv/grad_out" in client.plan("named", X, taps, of=NAMED).feature_maps
    with client.train("named") as trainer:
        np.testing.assert_array_equal(trainer.gradients(X, of=NAMED, at="conv")["conv"], expected)
    for method in ("saliency", "integrated_gradients"):
        found = client.attribute("named", X, method, of=NAMED)
        wanted = client.attribute("named", X, method, of=NUMBERED)
        np.testing.assert_array_equal(found.values, wanted.values)
        assert found.class_names == ("Tabby", "Tabby")


@pytest.mark.parametrize(
    ("model_id", "name", "words"),
    [
        ("named", "tabbi", "'named' has no class 'tabbi'; nearest: tabby"),
        ("named", "crane", "several classes 'crane': 2, 3; give the number"),
        ("plain", "tabby", "'plain' has no names of classes on the server; give the number of 'tabby'"),
    ],
)
def test_a_name_that_is_no_class_is_refused(
    client: trocar.Client, model_id: str, name: str, words: str
) -> None:
    with pytest.raises(ObjectiveOutOfRangeError, match=words):
        client.gradients(model_id, X, of=trocar.logit(name), at="conv")
    with pytest.raises(ObjectiveOutOfRangeError, match=words):
        client.plan(model_id, X, ["conv/grad_out"], of=trocar.logit(name))


def test_names_and_numbers_do_not_mix() -> None:
    with pytest.raises(TypeError):
        trocar.logit(["tabby", 3])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes token ids"):
        trocar.logit("tabby", positions=trocar.positions(prompt=[-1]))
