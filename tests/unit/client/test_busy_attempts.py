"""When a busy server is asked again."""

import time

import grpc
import pytest

from trocar._transport.attempts import Attempts
from trocar.errors import ServerBusyError, TrocarError

REFUSED = grpc.RpcError()


def busy(retry_after_s: float | None = None) -> ServerBusyError:
    error = ServerBusyError("busy")
    error.retry_after_s = retry_after_s
    return error


def attempts(retries: int = 3, timeout_s: float = 60.0, chance: float = 0.0) -> Attempts:
    return Attempts(retries, timeout_s, chance=lambda: chance)


@pytest.mark.parametrize(("chance", "expected"), [(0.0, 2.0), (0.5, 2.5), (1.0, 3.0)])
def test_it_comes_when_the_server_says_and_a_little_later_by_chance(chance: float, expected: float) -> None:
    assert attempts(chance=chance).pause_after(busy(2.0), REFUSED) == expected


def test_without_the_servers_word_pauses_double() -> None:
    call = attempts()
    assert [call.pause_after(busy(), REFUSED) for _ in range(4)] == [0.1, 0.2, 0.4, None]


def test_no_retries_means_none() -> None:
    assert attempts(retries=0).pause_after(busy(0.1), REFUSED) is None


def test_nobody_waits_longer_than_makes_sense_in_a_call() -> None:
    assert attempts().pause_after(busy(30.0), REFUSED) is None


def test_a_pause_fits_into_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    call = attempts(timeout_s=10)
    now[0] += 4
    assert call.pause_after(busy(5.0), REFUSED) == 5.0
    now[0] += 5.9
    assert call.pause_after(busy(0.2), REFUSED) is None


def test_what_is_refused_for_good_is_not_asked_again() -> None:
    class Wrong(grpc.RpcError):
        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.INVALID_ARGUMENT

        def details(self) -> str:
            return "no"

        def trailing_metadata(self) -> tuple[()]:
            return ()

    assert attempts().pause_after(TrocarError("no"), Wrong()) is None


class Ended(grpc.RpcError):
    """A call that ended in the middle."""

    def __init__(self, code: grpc.StatusCode) -> None:
        self._code = code

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return "the connection broke"

    def trailing_metadata(self) -> tuple[()]:
        return ()


BROKEN, CANCELLED = Ended(grpc.StatusCode.UNAVAILABLE), Ended(grpc.StatusCode.CANCELLED)
PROBLEM = TrocarError("broken")


def test_the_first_pause_after_a_broken_connection_is_as_documented() -> None:
    call = attempts(retries=7)
    assert [call.pause_after(PROBLEM, BROKEN) for _ in range(8)] == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, None]


def test_a_cancelled_call_is_repeated_only_where_it_resumes() -> None:
    assert attempts().pause_after(PROBLEM, CANCELLED) is None
    assert Attempts(3, resumes=True).pause_after(PROBLEM, CANCELLED) == 0.1


def test_progress_counts_failures_and_time_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    call = attempts(retries=1, timeout_s=10)
    assert call.pause_after(PROBLEM, BROKEN) == 0.1
    now[0] += 9
    call.progress()
    assert (call.remaining_s, call.pause_after(PROBLEM, BROKEN)) == (10, 0.1)
    assert call.pause_after(PROBLEM, BROKEN) is None


def test_what_only_took_too_long_is_taken_up_where_that_is_said() -> None:
    slow = Ended(grpc.StatusCode.DEADLINE_EXCEEDED)
    assert attempts().pause_after(PROBLEM, slow) is None
    assert attempts().pause_after(PROBLEM, slow, is_slow=True) == 0.1


def test_a_server_that_returns_is_awaited_beyond_the_number_of_retries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [50.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    call = Attempts(1, 100.0, returns_within_s=30.0)
    for pause_s in (0.1, 0.2, 0.4, 0.8):
        assert call.pause_after(PROBLEM, BROKEN) == pause_s
    assert call.pause_after(busy(), Ended(grpc.StatusCode.RESOURCE_EXHAUSTED)) is None
    now[0] += 29.9
    assert call.pause_after(PROBLEM, BROKEN) == 2.0
    now[0] += 0.2
    assert call.pause_after(PROBLEM, BROKEN) is None
