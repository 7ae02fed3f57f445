"""What a check has found, in one line."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum, unique

from trocar_server.config import ServerConfig


@unique
class Level(StrEnum):
    """How much it matters."""

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
    """What was looked at, in a word or two."""
    text: str
    """What was found."""
    advice: str = ""
    """What to do next; always there unless the level is `OK`."""

    def plain(self) -> dict[str, str]:
        """Return it as JSON has it."""
        return {key: str(value) for key, value in asdict(self).items()}


Check = Callable[[ServerConfig], Iterable[Finding]]
"""Looks at one thing. What it raises becomes a finding: a check that fails stops no other."""


def ok(subject: str, text: str) -> Finding:
    """Say that something is as it should be."""
    return Finding(Level.OK, subject, text)


def warn(subject: str, text: str, advice: str) -> Finding:
    """Say that something is not good."""
    return Finding(Level.WARN, subject, text, advice)


def fail(subject: str, text: str, advice: str) -> Finding:
    """Say that something does not work."""
    return Finding(Level.FAIL, subject, text, advice)
