"""Records of Python's `logging`, which gRPC and asyncio use; the server's own lines go to structlog.

    with log_records() as records:
        ...
    assert records == []

Not pytest's `caplog`: its plugin asks every logger of torch six times for each test.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def log_records(level: int = logging.WARNING) -> Iterator[list[logging.LogRecord]]:
    """Collect what is logged at this level or above inside the context, by any logger that propagates."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(level)
    handler.emit = records.append  # type: ignore[method-assign]
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield records
    finally:
        root.removeHandler(handler)
