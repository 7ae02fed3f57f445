"""Log format: text for people, or one JSON object per line."""

import logging
import sys
from enum import StrEnum
from typing import Any, TextIO

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
        processors=_processors(log_format, out),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(out),
        cache_logger_on_first_use=True,
    )


def early_log(log_format: str) -> Any:
    """Return a logger for lines before `set_up_logging`; they look the same, and structlog stays as it is."""
    return structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=_processors(log_format, sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )


def _processors(log_format: str, out: TextIO) -> list[structlog.typing.Processor]:
    return [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
        structlog.processors.format_exc_info,
        _event_first,
        _renderer(log_format, out),
    ]


def stderr_log(level: int = logging.INFO) -> Any:
    """Return a logger that writes to standard error and leaves structlog as it is set up.

    Args:
        level: The least that is written, as in `logging`.
    """
    return structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            _event_first,
            structlog.processors.LogfmtRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
    )


def _event_first(_: Any, __: str, fields: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Return a line's fields in the order in which people read them: what happened comes first."""
    event = fields.pop("event", None)
    return {"event": event, **fields}


def _renderer(log_format: str, stream: TextIO) -> structlog.typing.Processor:
    if log_format == LogFormat.JSON:
        return structlog.processors.JSONRenderer(default=str)
    if stream.isatty():
        return structlog.dev.ConsoleRenderer()
    return structlog.processors.LogfmtRenderer()
