"""Defects of servers under test: callers are told a request id, and only the log has the traceback."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from trocar_server.telemetry import CallRecord
from trocar_server.telemetry.call_observer import CallLines

TRACEBACKS: list[str] = []
"""Of the calls that were answered with INTERNAL since the last test ended."""


@contextmanager
def kept_defects() -> Iterator[None]:
    """Keep the tracebacks of servers in this process; the report of a test that fails shows them."""
    log = CallLines.defect

    def defect(self: CallLines, record: CallRecord, error: BaseException) -> None:
        TRACEBACKS.append("".join(traceback.format_exception(error)))
        log(self, record, error)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CallLines, "defect", defect)
        yield
