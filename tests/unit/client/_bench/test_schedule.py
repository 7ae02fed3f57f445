"""When calls of an open loop are due, by a clock that only the test moves."""

import numpy as np
import pytest
from scipy import stats

from tests.unit.client._bench.clocks import FakeClock
from trocar._bench.schedule import FIXED, POISSON, Rate, arrivals, dispatch, parse_rates


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("50", [Rate(50)]),
        ("2.5", [Rate(2.5)]),
        ("10, 20", [Rate(10), Rate(20)]),
        ("0.5x", [Rate(0.5, is_multiple=True)]),
        ("10..60", [Rate(10), Rate(20), Rate(30), Rate(40), Rate(50), Rate(60)]),
        ("0.5x..3x", [Rate(value, is_multiple=True) for value in (0.5, 1.0, 1.5, 2.0, 2.5, 3.0)]),
    ],
)
def test_rates_are_read(text: str, expected: list[Rate]) -> None:
    assert parse_rates(text) == expected


@pytest.mark.parametrize(
    "text", ["", "fast", "-5", "0", "0x", "1..", "3..1", "1..2x", "1x..2", "1e3", "1,,2"]
)
def test_other_texts_are_no_rates(text: str) -> None:
    with pytest.raises(ValueError, match="rate"):
        parse_rates(text)


def test_a_multiple_counts_in_what_a_closed_loop_reached() -> None:
    assert Rate(1.5, is_multiple=True).per_second(40) == 60
    assert Rate(1.5).per_second(40) == 1.5


def test_fixed_arrivals_lie_equally_apart() -> None:
    assert arrivals(4, 2, FIXED, seed=0) == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]


@pytest.mark.parametrize("kind", [FIXED, POISSON])
def test_one_call_is_due_however_rare_they_are(kind: str) -> None:
    assert arrivals(0.001, 0.5, kind, seed=0) == [0]


def test_poisson_gaps_are_exponentially_distributed_and_those_of_the_seed() -> None:
    due = np.array(arrivals(50, 100, POISSON, seed=3))
    assert np.all(np.diff(due) > 0)
    assert due[-1] < 100
    assert stats.kstest(np.diff(due), stats.expon(scale=1 / 50).cdf).pvalue > 0.01
    assert arrivals(50, 100, POISSON, seed=3) == due.tolist()
    assert arrivals(50, 100, POISSON, seed=4) != due.tolist()


def test_calls_begin_when_they_are_due() -> None:
    clock, begun = FakeClock(10.0), []
    dispatch([0.0, 0.5, 2.0], 11.0, lambda due_s: begun.append((due_s, clock.now())), clock)
    assert begun == [(11.0, 11.0), (11.5, 11.5), (13.0, 13.0)]
    assert clock.waits == [1.0, 0.5, 1.5]


def test_what_is_late_is_sent_at_once_and_moves_nothing_behind_it() -> None:
    clock, begun = FakeClock(), []

    def submit(due_s: float) -> None:
        begun.append((due_s, clock.now()))
        if due_s == 1.0:
            clock.pass_(2.5)  # this machine was busy with something else

    dispatch([0.0, 1.0, 2.0, 3.0, 4.0], 0.0, submit, clock)
    assert begun == [(0.0, 0.0), (1.0, 1.0), (2.0, 3.5), (3.0, 3.5), (4.0, 4.0)]


@pytest.mark.parametrize("rate", [0.5, 0.9, 2.0])
def test_latency_from_when_a_call_was_due_is_that_of_a_queue(rate: float) -> None:
    """One server, a second for each call: Lindley's recursion says how long each has to wait."""
    clock, latencies = FakeClock(), []

    def submit(due_s: float) -> None:
        clock.pass_(1.0)
        latencies.append(clock.now() - due_s)

    due = arrivals(rate, 200, POISSON, seed=1)
    dispatch(due, 0.0, submit, clock)
    waits = [0.0]
    for gap in np.diff(due):
        waits.append(max(waits[-1] + 1.0 - gap, 0.0))
    np.testing.assert_allclose(latencies, np.array(waits) + 1.0, rtol=0, atol=1e-9)
