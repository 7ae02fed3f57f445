"""Metrics, traces and the access log.

    telemetry = open_telemetry(config, engine, trainers, log)
    telemetry.observer          # the interceptor notifies it of every call

Services add to the record of the call that they work for: `phase`, `note_model`, `note_pass`. The engine and
trainers do not depend on it; their counters are read. See `docs/observability.md`.
"""

from trocar_server.telemetry.call_observer import (
    NOBODY,
    UNKNOWN_METHOD,
    CallLines,
    CallObserver,
    CallRecord,
    Observers,
    PassFacts,
    Phase,
    current_call,
    note_hit,
    note_model,
    note_pass,
    pass_facts,
    phase,
)
from trocar_server.telemetry.telemetry import Telemetry, open_telemetry
from trocar_server.telemetry.tracing import trace_id_of

__all__ = [
    "NOBODY",
    "UNKNOWN_METHOD",
    "CallLines",
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
    "pass_facts",
    "phase",
    "trace_id_of",
]
