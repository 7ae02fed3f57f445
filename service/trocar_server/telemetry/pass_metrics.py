"""Pass metrics, by model."""

from trocar_server.telemetry.call_metrics import SECONDS
from trocar_server.telemetry.call_observer import CallRecord, PassFacts
from trocar_server.telemetry.labels import ModelLabels
from trocar_server.telemetry.series import Counts, Histograms, SeriesCollector

_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_MODEL = ("model",)


class PassMetrics:
    """Counts passes.

    Args:
        labels: Label values of models.
    """

    wants_phases = False

    def __init__(self, labels: ModelLabels) -> None:
        self._labels = labels
        self._passes = Counts(
            "trocar_passes",
            "Passes, by backend and numerics.",
            ("model", "engine", "numerics"),
        )
        self._rows = Counts("trocar_rows", "Samples processed by passes.", _MODEL)
        self._cached = Counts("trocar_cache_hits", "Passes answered from the feature cache.", _MODEL)
        self._queue = Histograms(
            "trocar_queue_seconds", "Time that a pass waited, in seconds.", _MODEL, SECONDS
        )
        self._compute = Histograms(
            "trocar_compute_seconds", "Time to compute a pass, in seconds.", _MODEL, SECONDS
        )
        self._tokens = Counts("trocar_generated_tokens", "Generated tokens.", _MODEL)
        self._token = Histograms(
            "trocar_token_seconds",
            "Time from one generated token of a text to the next, in seconds.",
            _MODEL,
            SECONDS,
        )
        self._depth = Histograms(
            "trocar_stop_depth",
            "Module calls before the pass was stopped, as a fraction of those of a full pass.",
            _MODEL,
            _SHARES,
        )

    def collector(self) -> SeriesCollector:
        """Collector of these metrics."""
        return SeriesCollector(
            (
                *(self._passes, self._rows, self._cached, self._queue, self._compute, self._depth),
                *(self._tokens, self._token),
            )
        )

    def started(self, call: CallRecord) -> None:
        """Leave calls to `CallMetrics`."""

    def passed(self, call: CallRecord, facts: PassFacts) -> None:
        """Count a pass; one that the cache answered waited for nothing and computed nothing."""
        model = self._labels.of(facts.model_id)
        if not model:  # its model was unloaded for good meanwhile
            return
        key = (model,)
        self._passes.add((model, facts.engine, facts.numerics))
        self._rows.add(key, facts.row_count)
        self._cached.add(key, facts.is_cached)
        if facts.token_count:
            self._tokens.add(key, facts.token_count)
        if facts.token_s is not None:
            self._token.observe(key, facts.token_s)
        if facts.is_cached:
            return
        self._queue.observe(key, facts.queue_s)
        self._compute.observe(key, facts.compute_s)
        if facts.depth is not None:
            self._depth.observe(key, facts.depth)

    def finished(self, call: CallRecord) -> None:
        """Leave calls to `CallMetrics`."""
