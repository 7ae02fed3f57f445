"""When a busy server is asked again."""

import pytest

from trocar._retries import BusyRetries
from trocar.errors import ServerBusyError


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def busy(retry_after_s: float | None = None) -> ServerBusyError:
    error = ServerBusyError("busy")
    error.retry_after_s = retry_after_s
    return error


def begun(count: int = 3, timeout_s: float = 60.0, chance: float = 0.0) -> tuple[BusyRetries, Clock]:
    clock = Clock()
    retries = BusyRetries(count, timeout_s, clock, lambda: chance)
    assert retries.remaining_s() == timeout_s
    return retries, clock


@pytest.mark.parametrize(("chance", "expected"), [(0.0, 2.0), (0.5, 2.5), (1.0, 3.0)])
def test_it_comes_when_the_server_says_and_a_little_later_by_chance(chance: float, expected: float) -> None:
    assert begun(chance=chance)[0].pause_s(busy(2.0)) == expected


def test_without_the_servers_word_pauses_double() -> None:
    retries, _ = begun()
    assert [retries.pause_s(busy()) for _ in range(4)] == [0.1, 0.2, 0.4, None]


def test_no_retries_means_none() -> None:
    assert begun(count=0)[0].pause_s(busy(0.1)) is None


def test_attempts_share_one_timeout() -> None:
    retries, clock = begun(timeout_s=10)
    clock.now += 4
    assert retries.remaining_s() == 6
    assert retries.pause_s(busy(5.0)) == 5.0
    clock.now += 5.9
    assert retries.pause_s(busy(0.2)) is None
    clock.now += 5
    assert 0 < retries.remaining_s() < 0.01


def test_nobody_waits_longer_than_makes_sense_in_a_call() -> None:
    assert begun()[0].pause_s(busy(30.0)) is None
