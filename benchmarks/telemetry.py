"""Telemetry: the cost of metrics and traces per call, without the call itself.

python -m benchmarks.telemetry
"""

import time
from types import SimpleNamespace
from typing import Any

from trocar_server.engine.request.plan import Plan
from trocar_server.engine.run.extraction import ExecutionReport, Extraction
from trocar_server.telemetry import CallRecord, Observers, note_pass, pass_facts, phase
from trocar_server.telemetry.call_metrics import CallMetrics
from trocar_server.telemetry.call_observer import CallObserver
from trocar_server.telemetry.labels import ModelLabels
from trocar_server.telemetry.pass_metrics import PassMetrics
from trocar_server.telemetry.tracing import CallTracer

_CALLS = 2000
_ROUNDS = 20
_PLAN = Plan("resnet50", (), (), 0)
_PASS = Extraction((), (), None, 1e-5, 2e-2, report=ExecutionReport(row_count=1), depth=0.5)


def seconds_per_call(observer: Observers) -> float:
    """Return the least mean time of a call's records and phases over some rounds, in seconds."""
    best = float("inf")
    for _ in range(_ROUNDS):
        started = time.perf_counter()
        for _ in range(_CALLS):
            _watch_one(observer)
        best = min(best, (time.perf_counter() - started) / _CALLS)
    return best


def _watch_one(observer: Observers) -> None:
    call = CallRecord("/trocar_api.v1.ExtractionService/Extract", "BIDI_STREAMING", "id", observer)
    call.begin()
    call.name_model("resnet50")
    for name in ("receive", "check", "receive", "prepare", "reply"):
        with phase(name):
            pass
    call.bytes_in += 600_000
    note_pass(pass_facts(_PLAN, _PASS))
    call.bytes_out += 16_000
    call.end()


def main() -> None:
    """Print microseconds per call."""
    labels = ModelLabels(lambda _: "catalogue")
    metrics: list[CallObserver] = [CallMetrics(labels), PassMetrics(labels)]
    rows = {"nothing": Observers(), "metrics": Observers(tuple(metrics))}
    tracer = _tracer()
    if tracer is not None:
        rows["metrics and traces"] = Observers((tracer, *metrics))
    for name, observer in rows.items():
        print(f"{name:<20} {seconds_per_call(observer) * 1e6:6.1f} us")


def _tracer() -> CallTracer | None:
    """Return a tracer that drops its spans at the end; None without `trocar[otel]`."""
    try:
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    except ImportError:
        return None
    from trocar_server.telemetry.tracing import open_tracer

    nowhere: Any = SimpleNamespace(export=lambda spans: None, shutdown=lambda: None)
    return open_tracer("", SimpleSpanProcessor(nowhere))


if __name__ == "__main__":
    main()
