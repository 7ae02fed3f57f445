"""Failure handling of commands: message and exit code.

| code | means                                                        |
|------|--------------------------------------------------------------|
| 0    | done                                                         |
| 1    | the call failed; the error's message and reason are on stderr |
| 2    | the command line is wrong, or an extra is not installed      |
| 3    | no server answers                                            |

With `--json` the message is one line of JSON on stderr, `{"error": {"reason": ..., "message": ..., ...}}`;
stdout has results only.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import typer

from trocar._cli.usage_errors import is_usage_error, usage_lines, usage_message
from trocar.errors import MissingExtraError, ServerUnavailableError

FAILED = 1
USAGE = 2
UNREACHABLE = 3

_IS_JSON: ContextVar[bool] = ContextVar("failures_as_json", default=False)


@contextmanager
def failures_of(words: Sequence[str]) -> Iterator[bool]:
    """Show failures inside the context as JSON, if a command line asks for JSON; yield whether it does."""
    own = words[: words.index("--")] if "--" in words else words
    is_json = "--json" in own
    before = _IS_JSON.set(is_json)
    try:
        yield is_json
    finally:
        _IS_JSON.reset(before)


def show_failure(error: Exception, code: int) -> None:
    """Print an error to stderr: a message for people, or JSON."""
    typer.echo(failure_json(error, code) if _IS_JSON.get() else failure_text(error), err=True)


def exit_code(error: Exception) -> int:
    """Return the exit code of a failed command."""
    if isinstance(error, MissingExtraError):
        return USAGE
    is_silent = isinstance(error, ServerUnavailableError) and error.reason is None
    return UNREACHABLE if is_silent else FAILED


def failure_text(error: Exception) -> str:
    """Return the error's message, its reason if it has one, and its context."""
    reason = getattr(error, "reason", None)
    message = f"{_message(error)} [{reason}]" if reason else _message(error)
    return "\n".join([f"error: {message}", *_notes(error)])


def failure_json(error: Exception, code: int) -> str:
    """Return the error as one line of JSON.

    `reason` is null where there is none, as when no server answers, and `type` tells such errors apart.
    """
    reason = getattr(error, "reason", None)
    fields = {
        "reason": None if reason is None else str(reason),
        "type": type(error).__name__,
        "message": _message(error),
        "notes": _notes(error),
        "details": getattr(error, "details", {}),
        "request_id": getattr(error, "request_id", ""),
        "exit_code": code,
    }
    return json.dumps({"error": fields}, ensure_ascii=False)


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    usage: Any = error
    return usage_message(usage) if is_usage_error(error) else str(error)


def _notes(error: Exception) -> list[str]:
    usage = usage_lines(error) if is_usage_error(error) else []
    return [*getattr(error, "__notes__", ()), *usage]


def refuse(message: str) -> NoReturn:
    """End the command with a usage error.

    Raises:
        typer.BadParameter: Always.
    """
    raise typer.BadParameter(message)


def fail(message: str, code: int = FAILED) -> NoReturn:
    """End the command with a message on stderr.

    Raises:
        typer.Exit: Always.
    """
    show_failure(CommandFailedError(message), code)
    raise typer.Exit(code)


class CommandFailedError(Exception):
    """A command cannot go on, for a reason that is no failed call."""
