"""Finding: the one-line result of a check."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum, unique

from trocar_server.config import ServerConfig


@unique
class Level(StrEnum):
    """Severity of a finding."""

    OK = "OK"
    """As it should be."""
    WARN = "WARN"
    """The server works; something will go wrong or is slower than it could be."""
    FAIL = "FAIL"
    """The server will not start, or will not do what it was told to."""


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: Level
    subject: str
    """Subject of the check, in a word or two."""
    text: str
    """Result of the check."""
    advice: str = ""
    """What to do next; always there unless the level is `OK`."""

    def plain(self) -> dict[str, str]:
        """Return it as JSON has it."""
        return {key: str(value) for key, value in asdict(self).items()}


Check = Callable[[ServerConfig], Iterable[Finding]]
"""A check of one thing. An exception becomes a finding: a failing check stops no other."""


def ok(subject: str, text: str) -> Finding:
    """Finding that something is as it should be."""
    return Finding(Level.OK, subject, text)


def warn(subject: str, text: str, advice: str) -> Finding:
    """Finding of a problem that does not stop the server."""
    return Finding(Level.WARN, subject, text, advice)


def fail(subject: str, text: str, advice: str) -> Finding:
    """Finding of something that does not work."""
    return Finding(Level.FAIL, subject, text, advice)
