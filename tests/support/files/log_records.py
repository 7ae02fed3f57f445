"""Records of Python's `logging`, which gRPC and asyncio use; the server's own lines go to structlog.

    with log_records() as records:
        ...
    assert records == []

Not pytest's `caplog`: its plugin asks every logger of torch six times for each test.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


class _Keeper(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@contextmanager
def log_records(level: int = logging.WARNING) -> Iterator[list[logging.LogRecord]]:
    """Collect what is logged at this level or above inside the context, by any logger that propagates."""
    keeper, root = _Keeper(level), logging.getLogger()
    root.addHandler(keeper)
    try:
        yield keeper.records
    finally:
        root.removeHandler(keeper)
