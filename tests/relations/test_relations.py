"""Random requests on many families: whatever is asked in two ways has one answer.

    TROCAR_RELATIONS=6 TROCAR_RELATIONS_SEED=7 pytest tests/relations -s

draws 6 cases for each family and relation, the full size; without it, a small share of the families with a
seed that stays. A failure names its case: `replay("order", "bert", 7, 3)` of a shell does it again.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from random import Random

import pytest

from tests.relations import relations
from tests.relations.coverage import Coverage
from tests.relations.families import FAMILIES
from tests.relations.hosting import Hosts, hosted
from tests.relations.known import unexpected
from tests.relations.lengths import length
from tests.relations.outcome import Outcome
from tests.relations.splits import split
from tests.relations.ways import WAYS, compare_way

COUNT = int(os.environ.get("TROCAR_RELATIONS", "0"))
SEED = int(os.environ.get("TROCAR_RELATIONS_SEED", "0"))
SMALL = (
    *("time-first-gru", "last-state", "masked-encoder", "equal-towers", "tuple", "swin", "bert", "llama"),
    *("t5", "flava", "counting"),
)
"""The families of a usual run."""
CASES = COUNT or 2
RELATIONS: dict[str, Callable[..., Outcome]] = {
    "alone": relations.alone,
    "order": relations.order,
    "company": relations.company,
    "length": length,
    "split": split,
    **{way: partial(compare_way, way) for way in WAYS},
}
NAMES = tuple(FAMILIES) if COUNT else SMALL
_GROUP = 12


class Groups:
    """Hosts a few families at a time: a server of all would be long in starting."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._hosts: Hosts | None = None

    def of(self, family: str) -> Hosts:
        """Return the server of a family; that of other families is stopped."""
        if self._hosts is None or family not in self._hosts.names:
            self._stack.close()
            first = NAMES.index(family) // _GROUP * _GROUP
            self._hosts = self._stack.enter_context(hosted(NAMES[first : first + _GROUP]))
        return self._hosts


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    with ExitStack() as stack:
        yield Groups(stack)


@pytest.fixture(scope="module")
def coverage() -> Coverage:
    return Coverage()


def replay(relation: str, family: str, seed: int, number: int) -> Outcome:
    """Do one case again."""
    with hosted([family]) as running:
        return RELATIONS[relation](running, family, Random(f"{seed} {relation} {family} {number}"))


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("family", NAMES)
def test_two_ways_have_one_answer(groups: Groups, coverage: Coverage, family: str, relation: str) -> None:
    if FAMILIES[family].is_random and relation != "length":
        return
    wrong = []
    for number in range(CASES):
        outcome = RELATIONS[relation](
            groups.of(family), family, Random(f"{SEED} {relation} {family} {number}")
        )
        coverage.add(outcome)
        texts = [str(each) for each in unexpected(relation, family, outcome.comparison.differences)]
        if texts:
            wrong.append((f'replay("{relation}", "{family}", {SEED}, {number})', texts))
    assert not wrong


@pytest.mark.skipif(not COUNT, reason="a small share draws few pairs")
def test_most_pairs_are_drawn(coverage: Coverage) -> None:
    print(f"\n{coverage.table()}")
    assert min(coverage.shares().values()) >= 0.8, coverage.table()
