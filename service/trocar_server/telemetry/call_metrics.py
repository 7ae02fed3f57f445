"""Metrics of calls, under the names that gRPC's middlewares for Prometheus use.

Labels and their values are those of py-grpc-prometheus: `grpc_type="UNARY"`, `grpc_code="NOT_FOUND"`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from trocar_server.telemetry.calls import CallRecord, PassFacts
from trocar_server.telemetry.labels import ModelLabels

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""Upper bounds of the buckets: an empty call takes 0.4 ms, one with a large batch on a CPU many seconds."""

_METHOD = ("grpc_type", "grpc_service", "grpc_method")


@dataclass(frozen=True, slots=True)
class _OfMethod:
    """The metrics of one method, their labels filled in: looking these up takes longer than counting."""

    started: Any
    received: Any
    sent: Any
    seconds: Any
    in_flight: Any


class CallMetrics:
    """Counts calls.

    Args:
        registry: Where the metrics go.
        labels: Of models.
    """

    wants_phases = False

    def __init__(self, registry: CollectorRegistry, labels: ModelLabels) -> None:
        self._labels = labels
        counter = _counters(registry)
        self._started = counter("grpc_server_started", "Calls started.", _METHOD)
        self._handled = counter("grpc_server_handled", "Calls ended, by status.", (*_METHOD, "grpc_code"))
        self._received = counter("grpc_server_msg_received", "Request messages.", _METHOD)
        self._sent = counter("grpc_server_msg_sent", "Reply messages.", _METHOD)
        self._seconds = Histogram(
            "grpc_server_handling_seconds",
            "Seconds from a call's start to its end.",
            _METHOD,
            buckets=SECONDS,
            registry=registry,
        )
        self._in_flight = Gauge("trocar_calls_in_flight", "Calls that run now.", _METHOD, registry=registry)
        self._errors = counter("trocar_errors", "Calls that failed, by the reason given.", ("reason",))
        self._requests = counter("trocar_requests", "Calls by model and status.", ("model", "grpc_code"))
        self._bytes_in = counter("trocar_request_bytes", "Bytes of request messages.", ("model",))
        self._bytes_out = counter("trocar_reply_bytes", "Bytes of reply messages.", ("model",))
        self._methods: dict[tuple[str, str], _OfMethod] = {}
        self._ends: dict[tuple[str, str, str], Any] = {}

    def started(self, call: CallRecord) -> None:
        """Count the start."""
        own = self._methods.get((call.method, call.kind)) or self._add(call)
        own.started.inc()
        own.in_flight.inc()

    def passed(self, call: CallRecord, facts: PassFacts) -> None:
        """Leave passes to `PassMetrics`."""

    def finished(self, call: CallRecord) -> None:
        """Count the end, and what belongs to it."""
        own = self._methods[call.method, call.kind]
        own.in_flight.dec()
        own.received.inc(call.messages_in)
        own.sent.inc(call.messages_out)
        own.seconds.observe(call.elapsed_s)
        key = (call.method, call.kind, call.code)
        end = self._ends.get(key)
        if end is None:
            end = self._ends[key] = self._handled.labels(*_labels(call), call.code)
        end.inc()
        if call.reason:
            self._errors.labels(call.reason).inc()
        model = self._labels.of(call.model_id)
        if model:
            self._requests.labels(model, call.code).inc()
            self._bytes_in.labels(model).inc(call.bytes_in)
            self._bytes_out.labels(model).inc(call.bytes_out)

    def _add(self, call: CallRecord) -> _OfMethod:
        labels = _labels(call)
        own = _OfMethod(
            self._started.labels(*labels),
            self._received.labels(*labels),
            self._sent.labels(*labels),
            self._seconds.labels(*labels),
            self._in_flight.labels(*labels),
        )
        return self._methods.setdefault((call.method, call.kind), own)


def _labels(call: CallRecord) -> tuple[str, str, str]:
    _, service, method = call.method.split("/")
    return call.kind, service, method


def _counters(registry: CollectorRegistry) -> Callable[[str, str, tuple[str, ...]], Counter]:
    def make(name: str, what: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, what, labels, registry=registry)

    return make
