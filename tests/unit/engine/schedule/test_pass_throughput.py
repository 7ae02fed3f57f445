"""How long work takes, as far as is known."""

import pytest

from trocar_server.engine.schedule.pass_throughput import PassThroughput


def observed(*seconds: float, rows: int = 1) -> PassThroughput:
    throughput = PassThroughput()
    for each in seconds:
        throughput.observe(rows, each)
    return throughput


def test_steady_work_is_known_exactly() -> None:
    throughput = observed(0.5, 0.5, 0.5, rows=4)
    assert throughput.is_known
    assert throughput.seconds(16) == pytest.approx(2.0)


def test_nothing_is_known_of_two_passes() -> None:
    assert not observed(1.0, 1.0).is_known


def test_slow_first_passes_are_soon_forgotten() -> None:
    assert observed(10.0, *[0.1] * 10).seconds() < 0.12


def test_one_slow_pass_changes_little() -> None:
    assert observed(*[0.1] * 10, 1.0).seconds() == pytest.approx(0.19)


def test_it_follows_in_both_directions() -> None:
    assert observed(*[0.1] * 5, *[1.0] * 60).seconds() == pytest.approx(1.0, rel=0.01)


def test_no_rows_count_as_one() -> None:
    assert observed(2.0, rows=0).seconds(0) == 2.0
