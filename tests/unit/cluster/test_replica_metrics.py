"""Metrics of several replicas on one page, read by Prometheus' own parser."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from trocar_server.cluster.replica_metrics import merged


def metrics(value: float) -> str:
    registry = CollectorRegistry()
    Counter("calls", "Calls", ["method"], registry=registry).labels('a b{"\\').inc(value)
    Gauge("free_bytes", "Free", registry=registry).set(value)
    Histogram("seconds", "Seconds", ["model"], registry=registry).labels("m").observe(value)
    return generate_latest(registry).decode()


def samples(text: str) -> set[tuple[object, ...]]:
    return {
        (
            family.name,
            family.type,
            family.documentation,
            sample.name,
            *sorted(sample.labels.items()),
            sample.value,
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_every_sample_of_every_replica_is_there_once_with_its_label() -> None:
    texts = {"m/0": metrics(1.0), "m/1": metrics(2.0)}
    page = merged({**texts, "m/2": None})
    expected = {
        (*sample[:4], *sorted([*sample[4:-1], ("replica", replica)]), sample[-1])  # type: ignore[type-var]
        for replica, text in texts.items()
        for sample in samples(text)
    }
    found = samples(page)
    assert {sample for sample in found if sample[0] != "trocar_replica_up"} == expected
    up = {sample[4]: sample[-1] for sample in found if sample[0] == "trocar_replica_up"}
    assert up == {("replica", "m/0"): 1.0, ("replica", "m/1"): 1.0, ("replica", "m/2"): 0.0}
    assert page.count("# TYPE calls_total ") == 1
