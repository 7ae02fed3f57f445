"""Near names, for messages about unknown names."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

_MOST_NAMES = 5
_MOST_CHARACTERS = 100


def few(names: Sequence[object], most: int = _MOST_NAMES) -> str:
    """List the first of some names and count the rest: `a, b, c and 19,997 more`."""
    listed = ", ".join(shortened(name) for name in names[:most])
    left = len(names) - most
    return f"{listed} and {left:,} more" if left > 0 else listed


def shortened(text: object, most: int = _MOST_CHARACTERS) -> str:
    """Return a text for a message; the middle of a very long one is left out."""
    shown = str(text)
    if len(shown) <= most:
        return shown
    half = most // 2
    return f"{shown[:half]}...{shown[-half:]}"


def unknown_name(kind: str, name: object, names: Iterable[str]) -> KeyError:
    """Build the error for an unknown key of a mapping, with the nearest keys."""
    known = list(names)
    near = get_close_matches(str(name), known, n=3, cutoff=0.4)
    if near:
        return KeyError(f"no {kind} {name!r}; nearest: {', '.join(near)}")
    return KeyError(f"no {kind} {name!r}; available: {', '.join(known[:8]) or 'none'}")


def name_hint(name: object, names: Iterable[str]) -> str:
    """Return a hint for an unknown name: the nearest names, and all names."""
    known = list(names)
    near = get_close_matches(str(name), known, n=3, cutoff=0.5)
    available = f"available: {', '.join(known)}" if known else "none is available"
    return f"did you mean {' or '.join(near)}? {available}" if near else available
