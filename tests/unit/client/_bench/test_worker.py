"""What a process of clients does, by a clock that only the test moves."""

import threading

from tests.unit.client._bench.clocks import FakeClock
from trocar._bench.records import Answer
from trocar._bench.worker import CallFailedError, ClosedLoop, OpenLoop, run_closed, run_open


def test_a_closed_loop_calls_again_when_it_has_the_answer_until_its_time_is_over() -> None:
    clock = FakeClock(5.0)

    def call() -> Answer:
        clock.pass_(0.4)
        return Answer(compute_s=0.4)

    records = run_closed(ClosedLoop(start_s=6.0, duration_s=1.0), 7, call, clock)
    assert clock.waits == [1.0]
    assert [round(record.started_s, 9) for record in records] == [6.0, 6.4, 6.8]
    assert all(record.due_s == record.started_s for record in records)
    assert {record.client for record in records} == {7}


def test_a_closed_loop_makes_so_many_calls_where_a_number_is_given() -> None:
    clock = FakeClock()
    records = run_closed(ClosedLoop(0.0, 0.0, most_calls=5), 0, Answer, clock)
    assert len(records) == 5


def test_a_closed_loop_calls_once_where_the_time_is_over_already() -> None:
    clock = FakeClock(100.0)
    assert len(run_closed(ClosedLoop(0.0, 1.0), 0, Answer, clock)) == 1


def test_a_client_whose_calls_all_fail_gives_up() -> None:
    clock = FakeClock()

    def call() -> Answer:
        raise CallFailedError("SERVER_BUSY")

    records = run_closed(ClosedLoop(0.0, 1.0), 0, call, clock)  # the clock stands still: it would never end
    assert {record.error for record in records} == {"SERVER_BUSY"}
    assert len(records) == 20


def test_a_failure_now_and_then_ends_nothing() -> None:
    clock, turn = FakeClock(), iter(range(100))

    def call() -> Answer:
        if next(turn) % 2:
            raise CallFailedError("SERVER_BUSY")
        return Answer()

    records = run_closed(ClosedLoop(0.0, 1.0, most_calls=60), 0, call, clock)
    assert [bool(record.error) for record in records] == [False, True] * 30


def test_an_open_loop_sends_every_call_before_any_answer_is_there() -> None:
    """The calls end only when all have begun: one that waited for an earlier one would wait for ever."""
    clock, all_begun = FakeClock(), threading.Barrier(8)

    def call() -> Answer:
        all_begun.wait(timeout=60)
        return Answer()

    due = [index * 0.25 for index in range(8)]
    records = run_open(OpenLoop(0.0, due), [(0, call), (1, call)], clock)
    assert sorted(record.due_s for record in records) == due
    assert sorted((record.client, record.due_s) for record in records)[:4] == [
        (0, 0.0),
        (0, 0.5),
        (0, 1.0),
        (0, 1.5),
    ]
