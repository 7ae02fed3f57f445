"""Every relation fails on a planted fault of its own, and not without it."""

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from tests.relations.hosting import Hosts, hosted
from tests.relations.known import unexpected
from tests.relations.layouts import places
from tests.relations.planted import PLANTED, Planted, plant_other_weights
from tests.relations.request import Request, Wanted
from tests.relations.test_relations import RELATIONS

NAMES = sorted({planted.family for planted in PLANTED})


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosted(NAMES) as running:
        yield running


def _request(planted: Planted, prefix: str = "") -> Request:
    """Return the request of a fault; with other names it is none that the server has kept."""
    wanted = []
    for number, tap in enumerate(planted.taps):
        at = tap.selector.partition("/")[0]
        place = next(place for place in places(planted.family) if place.selector == at)
        named = replace(tap, alias=f"{prefix} {number}") if prefix else tap
        wanted.append(Wanted(named, place, place.samples))
    return Request(tuple(wanted))


def _differences(hosts: Hosts, relation: str, family: str, request: Request) -> list[str]:
    outcomes = [RELATIONS[relation](hosts, family, Random(seed), request) for seed in range(3)]
    return [
        str(each)
        for outcome in outcomes
        for each in unexpected(relation, family, outcome.comparison.differences)
    ]


def test_every_relation_has_a_planted_fault() -> None:
    assert {planted.relation for planted in PLANTED} | {"gateway"} == RELATIONS.keys()


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.relation)
def test_a_relation_fails_on_its_planted_fault(
    hosts: Hosts, planted: Planted, monkeypatch: pytest.MonkeyPatch
) -> None:
    if planted.relation != "local":  # which starts its server once
        assert _differences(hosts, planted.relation, planted.family, _request(planted)) == []
    planted.plant(monkeypatch)
    if planted.relation == "local":
        hosts.__dict__.pop("local", None)
    assert _differences(hosts, planted.relation, planted.family, _request(planted, "planted")) != []
    if planted.relation == "local":
        hosts.__dict__.pop("local")


def test_a_gateway_to_another_model_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    request = _request(next(planted for planted in PLANTED if planted.family == "tagger"))
    with hosted(["tagger"]) as right:
        assert _differences(right, "gateway", "tagger", request) == []
        plant_other_weights(monkeypatch)
        with hosted(["tagger"]) as wrong:
            right.__dict__["gateway"] = wrong.gateway
            assert _differences(right, "gateway", "tagger", request) != []
