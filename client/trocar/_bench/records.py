"""Call records, and the metrics computed from them."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Answer(NamedTuple):
    """Metadata of a reply."""

    queue_s: float = 0.0
    """Seconds that the call waited on the server."""
    compute_s: float = 0.0
    """Seconds of the pass."""
    numerics: str = ""
    """The numerics used; empty where the reply does not say."""
    engine: str = ""
    """What ran the pass; empty where the reply does not say."""
    is_cached: bool = False
    """Whether nothing was computed."""
    row_count: int = 0
    """The samples of the batch that it was run in, those of other calls included."""


class Record(NamedTuple):
    """One call; moments are on the machine's clock, in seconds."""

    client: int
    """Who called."""
    due_s: float
    """When it was due; when it began, in a closed loop."""
    started_s: float
    """When it was sent."""
    ended_s: float
    """When the answer was there."""
    answer: Answer = Answer()
    """What the reply said; nothing where it failed."""
    error: str = ""
    """Why it failed: the reason of the error; empty where it did not."""


@dataclass(frozen=True)
class Summary:
    """The numbers of one case. Times are of answered calls, in seconds; NaN without calls."""

    call_count: int
    """Calls that were answered."""
    errors: Mapping[str, int]
    """How many calls failed, by reason."""
    p50_s: float
    """The latency that half of the calls stay below, from the moment at which a call was due."""
    p90_s: float
    """That of nine tenths."""
    p99_s: float
    """That of 99 of a hundred."""
    max_s: float
    """The longest."""
    mean_s: float
    """The mean."""
    calls_per_s: float
    """Answered calls per second, of all clients together."""
    images_per_s: float
    """The same, times the batch."""
    queue_p50_s: float
    """What half of the calls waited on the server, at most."""
    compute_p50_s: float
    """What half of the passes took, at most."""
    send_lag_p99_s: float
    """How late calls of an open loop were sent, 99 of a hundred at most: the load generator's own delay."""
    numerics: Mapping[str, int]
    """Calls by the numerics that were used; `` where the server does not say."""
    engines: Mapping[str, int]
    """Calls by what ran them."""
    cached_count: int
    """Calls that the feature cache answered."""
    rows_mean: float
    """Samples of the batch that a call was run in, on average: more than its own where calls were merged."""


def summarise(rounds: Sequence[Sequence[Record]], batch: int) -> Summary:
    """Return the numbers of one case over all of its rounds; percentiles interpolate as NumPy's do."""
    answered = [record for records in rounds for record in records if not record.error]
    failed = [record for records in rounds for record in records if record.error]
    p50, p90, p99 = quantiles([r.ended_s - r.due_s for r in answered], (0.5, 0.9, 0.99))
    latencies = [r.ended_s - r.due_s for r in answered] or [float("nan")]
    speeds = [calls_per_second(records) for records in rounds if records]
    speed = float(np.median(speeds)) if speeds else 0.0
    return Summary(
        call_count=len(answered),
        errors=dict(Counter(record.error for record in failed)),
        p50_s=p50,
        p90_s=p90,
        p99_s=p99,
        max_s=max(latencies),
        mean_s=float(np.mean(latencies)),
        calls_per_s=speed,
        images_per_s=speed * batch,
        queue_p50_s=quantiles([r.answer.queue_s for r in answered], (0.5,))[0],
        compute_p50_s=quantiles([r.answer.compute_s for r in answered], (0.5,))[0],
        send_lag_p99_s=quantiles([r.started_s - r.due_s for r in answered], (0.99,))[0],
        numerics=dict(Counter(r.answer.numerics for r in answered)),
        engines=dict(Counter(r.answer.engine for r in answered)),
        cached_count=sum(r.answer.is_cached for r in answered),
        rows_mean=float(np.mean([r.answer.row_count for r in answered])) if answered else float("nan"),
    )


def quantiles(values: Sequence[float], shares: Iterable[float]) -> list[float]:
    """Return the quantiles of these shares; NaN for no values."""
    shares = list(shares)
    return [float(q) for q in np.quantile(values, shares)] if values else [float("nan")] * len(shares)


def calls_per_second(records: Sequence[Record]) -> float:
    """Return the answered calls per second of one round, the sum over its clients.

    Each client's time ends with its own last call: at the end of a round some finish before others, which
    would otherwise lower the server's rate.
    """
    start = min(record.due_s for record in records)
    speed = 0.0
    for client in {record.client for record in records}:
        own = [record for record in records if record.client == client]
        took = max(record.ended_s for record in own) - start
        speed += sum(not record.error for record in own) / took if took > 0 else 0.0
    return speed
