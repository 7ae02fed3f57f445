"""Texts, pictures and sound: see `processed.py`; the number of cases is that of `test_relations.py`."""

from collections.abc import Iterator
from random import Random

import pytest

from tests.relations.known import unexpected
from tests.relations.planted import PLANTED, TEXTS
from tests.relations.processed import KINDS, PROCESSED_RELATIONS, ProcessedHosts, hosted_kinds
from tests.relations.test_relations import COUNT, SEED

CASES = COUNT or 1
NAMES = tuple(KINDS) if COUNT else ("texts-bert", "texts-gpt2", "pictures", "sound")


@pytest.fixture(scope="module")
def hosts() -> Iterator[ProcessedHosts]:
    with hosted_kinds(NAMES) as running:
        yield running


@pytest.mark.parametrize("relation", PROCESSED_RELATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_prepared_inputs_in_two_ways_have_one_answer(hosts: ProcessedHosts, name: str, relation: str) -> None:
    wrong = []
    for number in range(CASES):
        outcome = PROCESSED_RELATIONS[relation](hosts, name, Random(f"{SEED} {relation} {name} {number}"))
        texts = [str(each) for each in unexpected(relation, name, outcome.comparison.differences)]
        if texts:
            wrong.append((number, texts))
    assert not wrong


FAULTS = {fault.relation: fault.plant for fault in PLANTED if fault.relation in PROCESSED_RELATIONS} | TEXTS
"""One for each relation; some are those of the same relation of values."""


def test_every_relation_has_a_planted_fault() -> None:
    assert FAULTS.keys() == PROCESSED_RELATIONS.keys()


@pytest.mark.parametrize("relation", FAULTS)
def test_a_relation_fails_on_its_planted_fault(
    hosts: ProcessedHosts, relation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    FAULTS[relation](monkeypatch)
    ask = PROCESSED_RELATIONS[relation]
    assert any(ask(hosts, "texts-bert", Random(number)).comparison.differences for number in range(10))
