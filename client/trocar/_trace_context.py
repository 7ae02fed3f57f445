"""The caller's trace, taken along: W3C trace context in the metadata of a call.

Only where the program uses OpenTelemetry itself. It is not imported here: what has not been imported has no
active span.
"""

import sys
from typing import Any

_TRACE = "opentelemetry.trace"


def trace_headers() -> tuple[tuple[str, str], ...]:
    """Return `traceparent`, and `tracestate` where there is one, of the span that is active now."""
    trace: Any = sys.modules.get(_TRACE)
    if trace is None or not hasattr(trace, "get_current_span"):  # nobody traces, or it is being imported
        return ()
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return ()
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags) & 0xFF:02x}"
    state = context.trace_state.to_header() if context.trace_state else ""
    headers = (("traceparent", parent),)
    return (*headers, ("tracestate", state)) if state else headers
