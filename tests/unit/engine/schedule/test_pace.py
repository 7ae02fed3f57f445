"""A pace never makes a pass look longer than it takes, and says nothing where it does not know."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trocar_server.engine.schedule.pace import MOST_TIMES, TELLING_S, TELLING_WORK, Pace

RATE = 5e9
"""Multiply-adds in a second of the device of these tests, without the overhead."""
WORK = st.integers(1, 10**15)
OVERHEAD = st.floats(0, 0.01)


@given(st.lists(WORK, max_size=20), WORK, OVERHEAD, st.floats(1, 100))
def test_no_pass_is_expected_to_take_longer_than_it_does(
    works: list[int], work: int, overhead_s: float, slower: float
) -> None:
    """Passes before had an overhead, and some ran beside other work: the best one counts."""
    pace = Pace()
    for index, other in enumerate(works):
        pace.observe(other, (overhead_s + other / RATE) * (slower if index % 2 else 1))
    if works:  # the largest ran alone, too
        pace.observe(max(works), overhead_s + max(works) / RATE)
    assert pace.least_s(work) <= overhead_s + work / RATE


@given(WORK)
def test_nothing_is_known_without_a_pass_that_tells(work: int) -> None:
    pace = Pace()
    for _ in range(20):
        pace.observe(10**12, TELLING_S / 2)
        pace.observe(TELLING_WORK - 1, 100.0)
    pace.observe(10**12, TELLING_S)
    assert pace.least_s(work) == 0
    assert not pace.tells(work)


def test_a_pass_tells_of_passes_that_are_not_much_larger() -> None:
    pace = Pace()
    for _ in range(3):
        pace.observe(10**9, 0.5)
    assert pace.least_s(10**9 * MOST_TIMES) == pytest.approx(0.25 * MOST_TIMES)
    assert pace.least_s(10**9 * MOST_TIMES + 1) == 0


def test_what_ran_is_safe_to_run_again_and_no_longer_watched() -> None:
    pace = Pace(example_work=10**9)
    assert pace.safe_work == 2 * 10**9
    for _ in range(8):
        assert pace.watched_work <= 10**10
        pace.observe(10**10, 1.0)
    assert pace.safe_work == 2 * 10**10
    assert pace.watched_work == 10**10 + 1
    assert not pace.may_exceed(10**10, 600)
