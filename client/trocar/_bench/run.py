"""Benchmark run: one case with warm-up, rounds of calls and local passes in turn, metrics."""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from trocar._bench.case import Case, LocalResult, Result, Settings
from trocar._bench.load import Load
from trocar._bench.local_passes import Local, LocalJob
from trocar._bench.records import Record, Summary, calls_per_second, quantiles, summarise
from trocar._bench.schedule import arrivals
from trocar._bench.worker import Target

_STEP_S = 1.0
"""Of the calls that wait for an engine."""


def run_case(
    case: Case,
    target: Target,
    settings: Settings,
    local: Local | None = None,
    local_job: LocalJob | None = None,
    tell: Callable[[str], None] = lambda _: None,
    capacity: float | None = None,
) -> Result:
    """Measure a case.

    Args:
        case: What to measure.
        target: Target of its clients.
        settings: Durations and options.
        local: Makes local passes, in turn with the rounds; None for none.
        local_job: Its job.
        tell: Called with the present step.
        capacity: The calls per second of a closed loop, if known; otherwise they are measured, if
            the rate is a multiple of them.

    Raises:
        HelperError: A process of the clients, or the local one, is gone.
    """
    per_round = settings.duration_s / settings.rounds
    rounds: list[list[Record]] = []
    own: list[float] = []
    with Load(target, case.clients, settings.processes) as load:
        tell("warm-up")
        warm_up(load, case, settings)
        if capacity is None and case.rate is not None and case.rate.is_multiple:
            capacity = _capacity(load, settings)
        rate = None if case.rate is None else case.rate.per_second(capacity or 1.0)
        for index in range(settings.rounds):
            tell(f"round {index + 1} of {settings.rounds}")
            if local is not None and local_job is not None:
                own += local.measure(replace(local_job, duration_s=per_round))
            if rate is None:
                rounds.append(load.closed(per_round, settings.most_calls))
            else:
                rounds.append(load.open(arrivals(rate, per_round, settings.arrivals, settings.seed + index)))
    calls = summarise(rounds, case.batch)
    return Result(case, calls, rate, capacity, compare(calls, own, case.batch) if own else None)


def warm_up(load: Load, case: Case, settings: Settings) -> None:
    """Call for a while; if faster numerics are requested, until they are used, within a limit."""
    most = None if settings.most_calls is None else 1
    records = load.closed(settings.warm_up_s, most)
    limit = time.monotonic() + settings.engine_wait_s
    while case.numerics not in (None, "exact") and time.monotonic() < limit:
        used = {record.answer.numerics for record in records if not record.error}
        if used <= {case.numerics, ""}:
            return
        records = load.closed(_STEP_S, most)


def _capacity(load: Load, settings: Settings) -> float:
    """Return the calls per second of a closed loop."""
    return calls_per_second(
        load.closed(max(settings.duration_s / settings.rounds, _STEP_S), settings.most_calls)
    )


def compare(calls: Summary, own: list[float], batch: int) -> LocalResult:
    """Compare the calls with local passes: ratios of medians."""
    p50, p99 = quantiles(own, (0.5, 0.99))
    images = batch / p50
    return LocalResult(
        pass_count=len(own),
        p50_s=float(np.median(own)),
        p99_s=p99,
        images_per_s=images,
        latency_ratio=calls.p50_s / p50,
        throughput_ratio=calls.images_per_s / images,
    )
