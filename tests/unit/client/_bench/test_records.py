"""The numbers of a case against NumPy."""

import math

import numpy as np
import pytest

from trocar._bench.records import Answer, Record, calls_per_second, summarise


def record(client: int, due_s: float, latency_s: float, **options: object) -> Record:
    return Record(client, due_s, due_s, due_s + latency_s, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101, 1000])
def test_latencies_are_those_of_numpy_over_all_rounds(count: int) -> None:
    latencies = np.random.default_rng(count).exponential(0.02, (3, count))
    rounds = [[record(0, float(index), value) for index, value in enumerate(row)] for row in latencies]
    found = summarise(rounds, batch=4)
    expected = np.percentile(latencies, [50, 90, 99])
    np.testing.assert_allclose([found.p50_s, found.p90_s, found.p99_s], expected, rtol=1e-9)
    np.testing.assert_allclose([found.max_s, found.mean_s], [latencies.max(), latencies.mean()], rtol=1e-9)
    assert found.call_count == 3 * count


def test_latency_counts_from_when_a_call_was_due_not_from_when_it_was_sent() -> None:
    found = summarise([[Record(0, due_s=1.0, started_s=3.0, ended_s=3.5)]], batch=1)
    assert found.p50_s == 2.5
    assert found.send_lag_p99_s == 2.0


def test_failed_calls_count_by_reason_and_in_nothing_else() -> None:
    answered = [record(0, 0.0, 0.5), record(0, 0.5, 0.5)]
    failed = [record(0, 1.0, 9.0, error="SERVER_BUSY"), record(0, 1.0, 0.1, error="SERVER_BUSY")]
    found = summarise([[*answered, *failed]], batch=1)
    assert found.errors == {"SERVER_BUSY": 2}
    assert (found.call_count, found.max_s) == (2, 0.5)


def test_nothing_answered_has_no_latency_and_no_speed() -> None:
    found = summarise([[record(0, 0.0, 1.0, error="INTERNAL")]], batch=1)
    assert math.isnan(found.p50_s)
    assert math.isnan(found.max_s)
    assert (found.call_count, found.calls_per_s) == (0, 0.0)


def test_speed_is_the_sum_over_clients_each_up_to_its_own_last_call() -> None:
    quick = [record(0, index * 0.5, 0.5) for index in range(4)]
    slow = [record(1, index * 2.0, 2.0) for index in range(2)]
    assert calls_per_second([*quick, *slow]) == pytest.approx(4 / 2 + 2 / 4)


def test_images_are_calls_times_the_batch_in_the_median_round() -> None:
    rounds = [[record(0, 0.0, seconds)] for seconds in (1.0, 0.5, 0.1)]
    found = summarise(rounds, batch=8)
    assert (found.calls_per_s, found.images_per_s) == pytest.approx((2.0, 16.0))


def test_what_replies_say_is_counted() -> None:
    answers = [
        Answer(0.1, 1.0, "exact", "eager", row_count=2),
        Answer(0.3, 3.0, "fast", "torch", is_cached=True, row_count=6),
    ]
    found = summarise([[record(0, 0.0, 4.0, answer=answer) for answer in answers]], batch=1)
    assert found.numerics == {"exact": 1, "fast": 1}
    assert found.engines == {"eager": 1, "torch": 1}
    assert (found.cached_count, found.rows_mean) == (1, 4)
    assert (found.queue_p50_s, found.compute_p50_s) == pytest.approx((0.2, 2.0))
