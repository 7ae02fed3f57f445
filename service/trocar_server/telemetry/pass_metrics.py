"""Metrics of passes, by model."""

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from trocar_server.telemetry.call_metrics import SECONDS
from trocar_server.telemetry.calls import CallRecord, PassFacts
from trocar_server.telemetry.labels import ModelLabels

_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_MODEL = ("model",)


class PassMetrics:
    """Counts passes.

    Args:
        registry: Where the metrics go.
        labels: Of models.
    """

    wants_phases = False

    def __init__(self, registry: CollectorRegistry, labels: ModelLabels) -> None:
        self._labels = labels
        self._passes = Counter(
            "trocar_passes",
            "Passes, by what ran them and how close to eager PyTorch.",
            ("model", "engine", "numerics"),
            registry=registry,
        )
        self._rows = Counter("trocar_rows", "Samples of passes.", _MODEL, registry=registry)
        self._cached = Counter(
            "trocar_cache_hits", "Passes answered by the feature cache.", _MODEL, registry=registry
        )
        self._queue = self._seconds("trocar_queue_seconds", "Seconds in which a pass waited.", registry)
        self._compute = self._seconds("trocar_compute_seconds", "Seconds of computing a pass.", registry)
        self._depth = Histogram(
            "trocar_stop_depth",
            "Calls of modules that ran before the pass was stopped, of those of a full pass.",
            _MODEL,
            buckets=_SHARES,
            registry=registry,
        )
        self._of: dict[str, tuple[Any, ...]] = {}

    def started(self, call: CallRecord) -> None:
        """Leave calls to `CallMetrics`."""

    def passed(self, call: CallRecord, facts: PassFacts) -> None:
        """Count a pass; one that the cache answered waited for nothing and computed nothing."""
        model = self._labels.of(facts.model_id)
        if not model:  # its model was unloaded for good meanwhile
            return
        rows, cached, queue, compute, depth = self._of.get(model) or self._add(model)
        self._passes.labels(model, facts.engine, facts.numerics).inc()
        rows.inc(facts.row_count)
        if facts.is_cached:
            cached.inc()
            return
        queue.observe(facts.queue_s)
        compute.observe(facts.compute_s)
        if facts.depth is not None:
            depth.observe(facts.depth)

    def finished(self, call: CallRecord) -> None:
        """Leave calls to `CallMetrics`."""

    def _add(self, model: str) -> tuple[Any, ...]:
        every = (self._rows, self._cached, self._queue, self._compute, self._depth)
        return self._of.setdefault(model, tuple(metric.labels(model) for metric in every))

    def _seconds(self, name: str, what: str, registry: CollectorRegistry) -> Histogram:
        return Histogram(name, what, _MODEL, buckets=SECONDS, registry=registry)
