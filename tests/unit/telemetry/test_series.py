"""Our counters and histograms against Prometheus' own."""

import random

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from trocar_server.telemetry.call_metrics import SECONDS
from trocar_server.telemetry.series import Counts, Histograms, SeriesCollector

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def samples(registry: CollectorRegistry) -> Samples:
    """Read everything but the times of creation, which ours have not."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def own(series: Counts | Histograms) -> Samples:
    registry = CollectorRegistry()
    registry.register(SeriesCollector((series,)))
    return samples(registry)


@pytest.mark.parametrize("seed", range(5))
def test_a_histogram_is_that_of_prometheus(seed: int) -> None:
    chance = random.Random(seed)
    theirs = CollectorRegistry()
    reference = Histogram("seconds", "Seconds.", ("model", "code"), buckets=SECONDS, registry=theirs)
    found = Histograms("seconds", "Seconds.", ("model", "code"), SECONDS)
    values = [*SECONDS, 0.0, 1e9, float("inf"), *(chance.expovariate(1.0) for _ in range(500))]
    for value in values:
        key = (chance.choice("ab"), chance.choice("xy"))
        reference.labels(*key).observe(value)
        found.observe(key, value)
    assert own(found) == pytest.approx(samples(theirs))


def test_a_counter_and_a_gauge_are_those_of_prometheus() -> None:
    theirs = CollectorRegistry()
    counter = Counter("calls", "Calls.", ("model",), registry=theirs)
    gauge = Gauge("running", "Now.", ("model",), registry=theirs)
    calls, running = (
        Counts("calls", "Calls.", ("model",)),
        Counts("running", "Now.", ("model",), is_gauge=True),
    )
    for name, amount in (("a", 1), ("b", 0), ("a", 2.5), ('odd "x"\n\\', 1)):
        counter.labels(name).inc(amount)
        calls.add((name,), amount)
        gauge.labels(name).inc(amount - 2)
        running.add((name,), amount - 2)
    assert own(calls) | own(running) == samples(theirs)


def test_what_nobody_counted_has_a_name_and_no_series() -> None:
    assert own(Counts("calls", "Calls.", ("model",))) == {}
    assert [*Histograms("s", "S.", ("model",), SECONDS).family().samples] == []
