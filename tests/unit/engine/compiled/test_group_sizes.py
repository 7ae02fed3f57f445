"""How large groups become."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trocar_server.engine.compiled.group_sizes import GroupSizes


def grown(
    seconds: Callable[[int], float], max_rows: int = 32, max_s: float = 1.0, rounds: int = 40
) -> GroupSizes:
    """Run the largest groups that are allowed, as many calls would."""
    sizes = GroupSizes(max_rows, max_s)
    for _ in range(40):
        rows = sizes.limit()
        sizes.record(rows, seconds(rows))
    return sizes


def test_the_first_call_runs_alone() -> None:
    assert GroupSizes(32, 1.0).limit() == 1


def test_groups_grow_while_a_row_gets_cheaper() -> None:
    assert grown(lambda rows: 0.004 + 0.001 * rows).limit() == 32


def test_groups_stay_small_where_rows_get_dearer() -> None:
    assert grown(lambda rows: 0.001 * rows**1.5).limit() == 1


def test_groups_stop_at_the_size_where_it_turns() -> None:
    assert grown(lambda rows: 0.004 + 0.001 * rows if rows <= 8 else 0.01 * rows).limit() == 8


def test_groups_stop_at_the_time_that_callers_may_wait() -> None:
    assert grown(lambda rows: 0.01 * rows, max_s=0.05).limit() == 4


def test_one_row_alone_may_take_any_time() -> None:
    assert grown(lambda rows: 9.0 * rows, max_s=0.1).limit() == 1


def test_what_did_not_pay_is_tried_again_later() -> None:
    sizes = grown(lambda rows: 0.001 * rows**2)
    assert sizes.limit() == 1
    tried = set()
    for _ in range(600):
        tried.add(sizes.limit())
        sizes.record(sizes.limit(), 0.001)
    assert 32 in tried


@given(st.lists(st.tuples(st.integers(1, 100), st.floats(1e-6, 10)), max_size=50), st.integers(1, 64))
def test_the_limit_is_always_between_one_and_the_most_rows(
    records: list[tuple[int, float]], max_rows: int
) -> None:
    sizes = GroupSizes(max_rows, 0.1)
    for rows, seconds in records:
        sizes.record(rows, seconds)
        assert 1 <= sizes.limit() <= max_rows


@pytest.mark.parametrize("max_rows", [1, 3])
def test_a_limit_that_is_no_power_of_two_holds(max_rows: int) -> None:
    assert grown(lambda rows: 0.01 + 1e-4 * rows, max_rows=max_rows).limit() <= max_rows


def test_no_size_is_tried_that_would_take_too_long() -> None:
    sizes, tried = GroupSizes(32, 0.05), []
    for _ in range(40):
        tried.append(sizes.limit())
        sizes.record(tried[-1], 0.01 * tried[-1])
    assert max(tried) == 4
