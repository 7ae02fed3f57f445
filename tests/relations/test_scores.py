"""Classes and attributions: see `scores.py`; the number of cases is that of `test_relations.py`."""

from collections.abc import Iterator
from random import Random

import pytest

from tests.relations.hosting import Hosts, hosted
from tests.relations.known import unexpected
from tests.relations.planted import plant_other_weights
from tests.relations.planted_scores import PLANTED
from tests.relations.scores import SCORE_RELATIONS, SCORED, draw_score
from tests.relations.test_relations import COUNT, SEED
from trocar._attribution.methods import METHODS

CASES = COUNT or 3
NAMES = SCORED if COUNT else ("last-state", "masked-encoder", "resnet", "swin", "vit", "bert-classes")


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosted(NAMES) as running:
        yield running


@pytest.mark.parametrize("relation", SCORE_RELATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_scores_in_two_ways_have_one_answer(hosts: Hosts, name: str, relation: str) -> None:
    wrong = []
    for number in range(CASES):
        outcome = SCORE_RELATIONS[relation](hosts, name, Random(f"{SEED} {relation} {name} {number}"))
        texts = [str(each) for each in unexpected(relation, name, outcome.comparison.differences)]
        if texts:
            wrong.append((number, texts))
    assert not wrong


def test_every_method_is_drawn() -> None:
    drawn = {draw_score(Random(number), "resnet", by_sample=False).method for number in range(150)}
    assert drawn == {"predict", *METHODS}


FAMILY = "resnet"
"""Where the planted faults show."""


def _is_noticed(hosts: Hosts, relation: str) -> bool:
    """Whether one of the first cases differs."""
    return any(
        SCORE_RELATIONS[relation](hosts, FAMILY, Random(number)).comparison.differences
        for number in range(20)
    )


def test_every_relation_has_a_planted_fault() -> None:
    assert PLANTED.keys() | {"gateway"} == SCORE_RELATIONS.keys()


@pytest.mark.parametrize("relation", PLANTED)
def test_a_relation_fails_on_its_planted_fault(
    hosts: Hosts, relation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    PLANTED[relation](monkeypatch)
    if relation == "local":  # which copies its models once
        hosts.__dict__.pop("local", None)
    assert _is_noticed(hosts, relation)
    if relation == "local":
        hosts.__dict__.pop("local")


def test_a_gateway_to_another_model_is_noticed(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_other_weights(monkeypatch)
    with hosted([FAMILY]) as wrong:
        right = hosts.__dict__.pop("gateway", None)
        hosts.__dict__["gateway"] = wrong.gateway
        assert _is_noticed(hosts, "gateway")
    hosts.__dict__.pop("gateway")
    if right is not None:
        hosts.__dict__["gateway"] = right
