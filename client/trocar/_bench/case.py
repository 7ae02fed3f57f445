"""Benchmark case: request, number of clients, rate; and its result."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from trocar._bench.records import Summary
from trocar._bench.schedule import POISSON, Rate

NUMERICS = ("exact", "fast", "bf16")


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    model_id: str
    """The model."""
    taps: tuple[str, ...]
    """What is collected."""
    batch: int
    """Samples of one call."""
    clients: int
    """Who call at once; in an open loop, who take turns."""
    numerics: str | None = None
    """What is asked for; the model's default when None."""
    rate: Rate | None = None
    """How often calls begin; None for a closed loop."""


@dataclass(frozen=True)
class Settings:
    """Measurement settings of cases."""

    duration_s: float = 10.0
    """Seconds of one case, over all rounds."""
    rounds: int = 4
    """How many parts they are in; local passes come between them."""
    warm_up_s: float = 2.0
    """Seconds of calls before, which do not count."""
    engine_wait_s: float = 60.0
    """How much longer calls go on before, until the numerics that were asked for are used."""
    arrivals: str = POISSON
    """Of an open loop: how far calls lie apart."""
    seed: int = 0
    """Of inputs and arrivals."""
    processes: int = 0
    """Of the clients; 0 for what suits the machine."""
    most_calls: int | None = None
    """Calls of each client in a round of a closed loop, instead of seconds."""


@dataclass(frozen=True)
class LocalResult:
    """The same passes without a server, made in turn with the rounds."""

    pass_count: int
    """How many."""
    p50_s: float
    """What half of them took, at most."""
    p99_s: float
    """What 99 of a hundred took, at most."""
    images_per_s: float
    """The batch, by the median."""
    latency_ratio: float
    """Median latency of the calls by the median here: below 1 the server was faster."""
    throughput_ratio: float
    """Images per second of the calls by those here: above 1 the server was faster."""


@dataclass(frozen=True)
class Result:
    """Result of a case."""

    case: Case
    """What was asked."""
    calls: Summary
    """The calls."""
    rate_per_s: float | None = None
    """Of an open loop: calls per second that were due."""
    capacity_per_s: float | None = None
    """Where the rate is a multiple: the calls per second that a closed loop reached."""
    local: LocalResult | None = None
    """Local passes, where they were measured."""


def cases(
    models: Sequence[str],
    taps: Sequence[tuple[str, ...]],
    *,
    batches: Sequence[int],
    clients: Sequence[int],
    numerics: Sequence[str | None],
    rates: Sequence[Rate | None],
) -> Iterator[Case]:
    """Yield every combination; the last dimension varies fastest."""
    for model_id, wanted, batch, count, kind, rate in product(
        models, taps, batches, clients, numerics, rates
    ):
        yield Case(model_id, wanted, batch, count, kind, rate)
