"""The log line of a call: its fields, in order. Each is short, and one line, whatever the caller sent."""

from typing import Any

from trocar_server.telemetry import CallRecord

_MAX_METHOD_CHARACTERS = 120


def call_line(record: CallRecord) -> dict[str, Any]:
    """Return the fields of a call's line; `docs/observability.md` explains them.

    Bytes are those of the messages. What does not apply is left out: `model`, `reason`, `trace_id`, and what
    is told of passes.
    """
    found: dict[str, Any] = {
        "method": plain(record.called[:_MAX_METHOD_CHARACTERS]) or record.method,
        "request_id": record.request_id,
        "principal": plain(record.principal),
        "code": record.code,
        "ms": round(record.elapsed_s * 1000, 2),
        "bytes_in": record.bytes_in,
        "bytes_out": record.bytes_out,
    }
    if record.model_id:
        found["model"] = plain(record.model_id)
    if record.reason:
        found["reason"] = str(record.reason)
    if record.pass_count:
        found["rows"] = record.row_count
        found["queue_ms"] = round(record.queue_s * 1000, 2)
        found["compute_ms"] = round(record.compute_s * 1000, 2)
    if record.trace_id:
        found["trace_id"] = record.trace_id
    return found


def plain(text: str) -> str:
    """Return text with everything replaced that is not printable, line ends among it."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
