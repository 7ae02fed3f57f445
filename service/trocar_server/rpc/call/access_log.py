"""Access log: the fields of a call's line, in order. Each is short and on one line for any request."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from trocar_server.telemetry import CallRecord

_MAX_METHOD_CHARACTERS = 120
_STRANGERS_BURST, _STRANGERS_PER_S = 500, 10.0
_DEFECTS_BURST, _DEFECTS_PER_S = 100, 1.0
_STRANGER = "-"


@dataclass
class Allowance:
    """Rate limit of log lines (token bucket): a burst, then a number per second.

    Args:
        burst: The most lines at once.
        per_s: Lines per second after that.
        clock: Monotonic seconds.
    """

    burst: float
    per_s: float
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._left, self._at_s, self._refused = self.burst, self.clock(), 0

    def take(self) -> bool:
        """Whether one more line may be written."""
        now_s = self.clock()
        self._left = min(self.burst, self._left + (now_s - self._at_s) * self.per_s)
        self._at_s = now_s
        if self._left < 1:
            self._refused += 1
            return False
        self._left -= 1
        return True

    def refused(self) -> int:
        """Number of lines suppressed since the last call."""
        count, self._refused = self._refused, 0
        return count


class CallLines:
    """Writes a line for each call; lines about unauthorized callers are rate-limited.

    Args:
        log: structlog's.
    """

    def __init__(self, log: Any) -> None:
        self._log = log
        self._strangers = Allowance(_STRANGERS_BURST, _STRANGERS_PER_S)
        self._defects = Allowance(_DEFECTS_BURST, _DEFECTS_PER_S)

    def write(self, record: CallRecord) -> None:
        """Queue the line of a call: its caller does not wait for our log."""
        if record.principal == _STRANGER:
            if not self._strangers.take():
                return
            if missing := self._strangers.refused():
                self._log.warning("calls without authentication were not logged", count=missing)
        asyncio.get_running_loop().call_soon(partial(self._log.info, "call", **call_line(record)))

    def defect(self, record: CallRecord, error: BaseException) -> None:
        """Log an internal error, with its traceback unless there were many."""
        trace = {"exc_info": error} if self._defects.take() else {"error": type(error).__name__}
        self._log.error("defect", method=record.method, request_id=record.request_id, **trace)


def call_line(record: CallRecord) -> dict[str, Any]:
    """Fields of a call's line; `docs/observability.md` explains them.

    Bytes are those of the messages. Fields that do not apply are omitted: `model`, `reason`, `trace_id`, and
    those of passes.
    """
    found: dict[str, Any] = {
        "method": plain(record.called[:_MAX_METHOD_CHARACTERS]) if record.called else record.method,
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


@lru_cache(maxsize=1024)
def plain(text: str) -> str:
    """The text with unprintable characters, including line ends, replaced."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
