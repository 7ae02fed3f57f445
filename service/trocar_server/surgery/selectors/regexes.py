"""Untrusted regular expressions: RE2, linear time in the text for every pattern.

Python's `re` tries alternatives one after the other, so that `(a+)+b` on forty letters runs for hours.
The price: RE2 has no lookaround and no backreferences.
"""

from functools import lru_cache
from typing import Any

import re2

_MAX_PATTERN_MEMORY_BYTES = 1 << 20

# Bounds the time for one path. Where RE2's fast path runs out of memory, it is instructions times
# characters: 0.05 ms for 60 of them. `layer[34]\.\d+\.conv\d` has 19 instructions.
_MAX_INSTRUCTIONS = 1000


class InvalidPatternError(ValueError):
    """RE2 rejects a pattern: the argument is RE2's message."""


def check_pattern(pattern: str) -> None:
    """Reject an invalid regular expression.

    Raises:
        InvalidPatternError: With RE2's message.
    """
    _compiled(pattern)


def matches_whole(pattern: str, text: str) -> bool:
    """Whether a checked pattern matches the text from its first character to its last."""
    try:
        return _compiled(pattern).fullmatch(text) is not None
    except UnicodeEncodeError:  # a module's name that UTF-8 cannot encode
        return False


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.max_mem = _MAX_PATTERN_MEMORY_BYTES
    options.never_capture = True
    options.log_errors = False
    try:
        compiled = re2.compile(pattern, options)
    except re2.error as error:
        words = error.args[0] if error.args else b""
        raise InvalidPatternError(
            words.decode(errors="replace") if isinstance(words, bytes) else words
        ) from None
    if max(compiled.programsize, compiled.reverseprogramsize) > _MAX_INSTRUCTIONS:
        raise InvalidPatternError("pattern too large: fewer or smaller repetitions")
    return compiled
