"""Call metrics, under the names that gRPC's middlewares for Prometheus use.

Labels and their values are those of py-grpc-prometheus: `grpc_type="UNARY"`, `grpc_code="NOT_FOUND"`.
"""

from trocar_server.telemetry.call_observer import CallRecord, PassFacts
from trocar_server.telemetry.labels import ModelLabels
from trocar_server.telemetry.series import Counts, Histograms, Key, SeriesCollector

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
"""Upper bounds of the buckets: an empty call takes 0.4 ms, one with a large batch on a CPU many seconds."""

_METHOD = ("grpc_type", "grpc_service", "grpc_method")
_MODEL = ("model",)


class CallMetrics:
    """Counts calls.

    Args:
        labels: Label values of models.
    """

    wants_phases = False

    def __init__(self, labels: ModelLabels) -> None:
        self._labels = labels
        self._started = Counts("grpc_server_started", "Calls started.", _METHOD)
        self._handled = Counts(
            "grpc_server_handled", "Calls finished, by status code.", (*_METHOD, "grpc_code")
        )
        self._received = Counts("grpc_server_msg_received", "Request messages.", _METHOD)
        self._sent = Counts("grpc_server_msg_sent", "Reply messages.", _METHOD)
        self._seconds = Histograms(
            "grpc_server_handling_seconds", "Duration of calls, in seconds.", _METHOD, SECONDS
        )
        self._in_flight = Counts("trocar_calls_in_flight", "Calls in progress.", _METHOD, is_gauge=True)
        self._errors = Counts("trocar_errors", "Failed calls, by error reason.", ("reason",))
        self._requests = Counts(
            "trocar_requests", "Calls that name a model, by status code.", ("model", "grpc_code")
        )
        self._bytes_in = Counts("trocar_request_bytes", "Bytes of request messages.", _MODEL)
        self._bytes_out = Counts("trocar_reply_bytes", "Bytes of reply messages.", _MODEL)
        self._methods: dict[tuple[str, str], Key] = {}

    def collector(self) -> SeriesCollector:
        """Collector of these metrics."""
        return SeriesCollector(
            (
                *(self._started, self._handled, self._received, self._sent, self._seconds, self._in_flight),
                *(self._errors, self._requests, self._bytes_in, self._bytes_out),
            )
        )

    def started(self, call: CallRecord) -> None:
        """Count the start."""
        key = self._key(call)
        self._started.add(key)
        self._in_flight.add(key)

    def passed(self, call: CallRecord, facts: PassFacts) -> None:
        """Leave passes to `PassMetrics`."""

    def finished(self, call: CallRecord) -> None:
        """Count the end, with status, duration and bytes."""
        key = self._key(call)
        self._in_flight.add(key, -1)
        self._received.add(key, call.messages_in)
        self._sent.add(key, call.messages_out)
        self._seconds.observe(key, call.elapsed_s)
        self._handled.add((*key, call.code))
        if call.reason:
            self._errors.add((call.reason,))
        model = self._labels.of(call.model_id)
        if model:
            self._requests.add((model, call.code))
            self._bytes_in.add((model,), call.bytes_in)
            self._bytes_out.add((model,), call.bytes_out)

    def _key(self, call: CallRecord) -> Key:
        result = self._methods.get((call.method, call.kind))
        if result is None:
            _, service, method = call.method.split("/")
            result = self._methods[call.method, call.kind] = (call.kind, service, method)
        return result
