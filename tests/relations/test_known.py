"""Each fault of `known.py` is still there: one that is mended must leave that file."""

from collections.abc import Iterator
from random import Random

import pytest

from tests.relations.hosting import Hosts, hosted
from tests.relations.known import KNOWN, Known
from tests.relations.layouts import places
from tests.relations.request import Request, Wanted
from tests.relations.test_relations import RELATIONS


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with hosted(sorted({known.shown_by[0] for known in KNOWN if known.shown_by})) as running:
        yield running


@pytest.mark.parametrize("known", [known for known in KNOWN if known.shown_by], ids=lambda known: known.name)
def test_a_known_fault_is_still_there(hosts: Hosts, known: Known) -> None:
    assert known.shown_by
    family, tap = known.shown_by
    place = next(place for place in places(family) if place.selector == tap.selector)
    request = Request((Wanted(tap, place, place.samples),))
    differences = [
        difference
        for number in range(4)
        for difference in RELATIONS[known.relations[0]](
            hosts, family, Random(number), request
        ).comparison.differences
    ]
    assert differences, f"'{known.name}' is mended: remove its line from known.py"
    assert all(known.excuses(known.relations[0], family, difference) for difference in differences)
