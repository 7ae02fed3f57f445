"""Near names for messages about a name that is not there."""

from collections.abc import Iterable
from difflib import get_close_matches


def unknown_name(kind: str, name: object, names: Iterable[str]) -> KeyError:
    """Build the error for a name that a mapping does not have, with the nearest that it has."""
    known = list(names)
    near = get_close_matches(str(name), known, n=3, cutoff=0.4)
    if near:
        return KeyError(f"no {kind} {name!r}; nearest: {', '.join(near)}")
    return KeyError(f"no {kind} {name!r}; there is {', '.join(known[:8]) or 'none'}")


def name_hint(name: object, names: Iterable[str]) -> str:
    """Say for a name that there is not which ones are near and which there are."""
    known = list(names)
    near = get_close_matches(str(name), known, n=3, cutoff=0.5)
    there = f"there is {', '.join(known)}" if known else "there is none"
    return f"did you mean {' or '.join(near)}? {there}" if near else there
