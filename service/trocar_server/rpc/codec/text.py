"""Outgoing text: protobuf and gRPC reject lone surrogates, and metadata has a size limit."""

from collections.abc import Callable
from itertools import accumulate, takewhile

_ELLIPSIS = "..."


def sendable(text: str) -> str:
    r"""Return text that UTF-8 can hold: half a surrogate pair becomes its escape, `\ud800`."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def shortened(text: str, max_bytes: int, *, is_percent_encoded: bool = False) -> str:
    """Return sendable text of at most so many bytes; truncated text ends in three dots.

    Args:
        text: Any text.
        max_bytes: Room in bytes; at least those of the dots.
        is_percent_encoded: Whether gRPC writes it as the status message, with three bytes for each
            that is not printable ASCII, and for `%`.
    """
    whole = sendable(text[: max_bytes + 1])
    cost = _percent_encoded_bytes if is_percent_encoded else _utf8_bytes
    kept = _prefix_length(whole, max_bytes, cost)
    if kept == len(whole):
        return whole
    return whole[: _prefix_length(whole, max_bytes - len(_ELLIPSIS), cost)] + _ELLIPSIS


def _prefix_length(text: str, max_bytes: int, cost: Callable[[str], int]) -> int:
    """Number of characters that fit."""
    used = accumulate(cost(character) for character in text)
    return sum(1 for _ in takewhile(lambda total: total <= max_bytes, used))


def _utf8_bytes(character: str) -> int:
    return len(character.encode())


def _percent_encoded_bytes(character: str) -> int:
    return 1 if " " <= character <= "~" and character != "%" else 3 * _utf8_bytes(character)
