"""How a command ends when it cannot do its work.

| code | means                                                        |
|------|--------------------------------------------------------------|
| 0    | done                                                         |
| 1    | the call failed; the error's message and reason are on stderr |
| 2    | the command line is wrong, or an extra is not installed      |
| 3    | no server answers                                            |
"""

from typing import NoReturn

import typer

from trocar.errors import ServerUnavailableError, TrocarError

FAILED = 1
USAGE = 2
UNREACHABLE = 3


def exit_code(error: Exception) -> int:
    """Return the code that a failed command exits with."""
    is_silent = isinstance(error, ServerUnavailableError) and error.reason is None
    return UNREACHABLE if is_silent else FAILED


def failure_text(error: Exception) -> str:
    """Say what failed, its reason where it has one, and what was being done."""
    if isinstance(error, TrocarError):
        message = f"{error} [{error.reason}]" if error.reason else str(error)
    elif isinstance(error, OSError) and error.strerror:
        message = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    else:
        message = str(error)
    return "\n".join([f"error: {message}", *getattr(error, "__notes__", ())])


def refuse(message: str) -> NoReturn:
    """End the command because of how it was called.

    Raises:
        typer.BadParameter: Always.
    """
    raise typer.BadParameter(message)


def fail(message: str, code: int = FAILED) -> NoReturn:
    """End the command with a message on stderr.

    Raises:
        typer.Exit: Always.
    """
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)
