"""Metrics, traces and what a log line of a call says.

    telemetry = open_telemetry(config, engine, trainers, log)
    telemetry.observer          # the interceptor tells it of every call

Services add to the record of the call that they work for: `phase`, `note_model`, `note_pass`. The engine and
trainers know nothing of it; what they count is read. See `docs/observability.md`.
"""

from trocar_server.telemetry.calls import (
    NOBODY,
    UNKNOWN_METHOD,
    CallObserver,
    CallRecord,
    Observers,
    PassFacts,
    Phase,
    current_call,
    note_model,
    phase,
)
from trocar_server.telemetry.passes import note_hit, note_pass
from trocar_server.telemetry.telemetry import Telemetry, open_telemetry
from trocar_server.telemetry.tracing import trace_id_of

__all__ = [
    "NOBODY",
    "UNKNOWN_METHOD",
    "CallObserver",
    "CallRecord",
    "Observers",
    "PassFacts",
    "Phase",
    "Telemetry",
    "current_call",
    "note_hit",
    "note_model",
    "note_pass",
    "open_telemetry",
    "phase",
    "trace_id_of",
]
