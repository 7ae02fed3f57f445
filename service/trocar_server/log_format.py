"""How log lines are written: for people, or one JSON object each."""

import logging
import sys
from enum import StrEnum
from typing import TextIO

import structlog


class LogFormat(StrEnum):
    """What a line looks like."""

    TEXT = "text"
    JSON = "json"


def set_up_logging(log_format: str = LogFormat.TEXT, stream: TextIO | None = None) -> None:
    """Write the lines of this process to a stream, from information upwards.

    Text is `key=value` (logfmt), and coloured columns on a terminal.

    Args:
        log_format: `text` or `json`.
        stream: Standard error when None.
    """
    out = stream or sys.stderr
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            _renderer(log_format, out),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=True,
    )


def _renderer(log_format: str, stream: TextIO) -> structlog.typing.Processor:
    if log_format == LogFormat.JSON:
        return structlog.processors.JSONRenderer(default=str)
    if stream.isatty():
        return structlog.dev.ConsoleRenderer()
    return structlog.processors.LogfmtRenderer()
