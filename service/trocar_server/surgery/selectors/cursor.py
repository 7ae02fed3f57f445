"""Cursor: left-to-right reading of a selector, with errors that point at the character."""

import json
import re

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

MAX_DIGITS = 9

_DIGITS = re.compile("[0-9]+")
_SHOWN_BEFORE, _SHOWN_AFTER = 100, 60

# A JSON string without its closing quote. Possessive, so that a long one cannot backtrack.
_QUOTED = re.compile(r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*+')
_CUT_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")


class Cursor:
    """A text and the position up to which it has been read.

    cursor = Cursor("fc@-1")
    cursor.match(NAME)                  # "fc"
    cursor.take("@")                    # True
    cursor.number("a call index")       # -1
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    @property
    def next(self) -> str:
        """The next character; empty at the end."""
        return self.text[self.position : self.position + 1]

    def take(self, expected: str) -> bool:
        """Consume this text if it comes next."""
        if not self.text.startswith(expected, self.position):
            return False
        self.position += len(expected)
        return True

    def match(self, pattern: re.Pattern[str]) -> str | None:
        """Consume and return the match at this position, or None."""
        result = pattern.match(self.text, self.position)
        if result is None:
            return None
        self.position = result.end()
        return result.group()

    def number(self, what: str) -> int:
        """Read an integer, which may be negative; `what` is its name in errors."""
        sign = -1 if self.take("-") else 1
        start = self.position
        digits = self.match(_DIGITS)
        if digits is None:
            raise self.invalid(f"expected {what}")
        if len(digits) > MAX_DIGITS:
            raise self.invalid(f"a number can have at most {MAX_DIGITS} digits", start + MAX_DIGITS)
        return sign * int(digits)

    def quoted(self) -> str:
        """Read a JSON string, which must come next."""
        start = self.position
        inside = self.match(_QUOTED)
        if inside is None:
            raise self.invalid("expected text in double quotes")
        if self.match(_CUT_ESCAPE) is not None or not self.next:
            raise self.invalid(f"the quotes that open at character {start + 1} are not closed")
        if not self.take('"'):
            problem = (
                "in quotes a backslash is written twice"
                if self.next == "\\"
                else "no control characters here"
            )
            raise self.invalid(f"{problem}, as in JSON")
        value = str(json.loads(self.text[start : self.position]))
        if not _is_sendable(value):
            raise self.invalid("half of a surrogate pair is not a character", start)
        return value

    def invalid(self, problem: str, position: int | None = None) -> ServiceError:
        """Build the error that points at a position, by default at the next character."""
        return invalid_selector(self.text, self.position if position is None else position, problem)


def invalid_selector(text: str, position: int, problem: str) -> ServiceError:
    """Build the error for a selector that does not follow the grammar.

    The message has the selector, or the surroundings of the position in a long one, and below it a caret.
    """
    start = max(0, position - _SHOWN_BEFORE)
    before = ("..." if start else "") + _visible(text[start:position])
    after = _visible(text[position : position + _SHOWN_AFTER])
    shown = before + after + ("..." if position + _SHOWN_AFTER < len(text) else "")
    return ServiceError(
        ErrorReason.INVALID_SELECTOR,
        f"selector '{shown}': {problem} (character {position + 1})\n  {shown}\n  {' ' * len(before)}^",
        selector=shown,
        position=str(position),
    )


def _visible(text: str) -> str:
    """Escape non-printable characters, a line break for example, as Python does: the caret stays in place."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text
    )


def _is_sendable(text: str) -> bool:
    """Whether UTF-8 can encode it; otherwise a reply could not carry it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
