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


_MEANT = {
    "clamp": 'trocar.training.gradient_edit(at, "clamp", low, high)',
    "clip": 'trocar.training.gradient_edit(at, "clip_norm_of_all", max_norm=...)',
    "gradient_rule": "trocar.training.gradient_edit(at, operation, ...)",
    "spool": "trocar.training.save_on_disk(...)",
    "host_memory": "trocar.training.save_on_host()",
    "cosine": 'trocar.training.schedule("cosine", ...)',
    "Server": 'trocar.connect("local", models=...)',
    "steer": 'trocar.edit(at, "steer", ...)',
    **{name: f"client.{name}(...)" for name in ("extract", "gradients", "grad_cam", "train", "generate")},
}
"""What names stand for that others use, or that were used before."""


def unknown_attribute(module: str, name: str, names: Iterable[str]) -> AttributeError:
    """Build the error for an unknown name of a module, with what is meant or the nearest names."""
    problem = f"module {module!r} has no attribute {name!r}"
    if name in _MEANT:
        return AttributeError(f"{problem}; it is {_MEANT[name]}")
    near = get_close_matches(name, list(names), n=3, cutoff=0.6)
    return AttributeError(f"{problem}; nearest: {', '.join(near)}" if near else problem)


def name_hint(name: object, names: Iterable[str]) -> str:
    """Return a hint for an unknown name: the nearest names, and all names."""
    known = list(names)
    near = get_close_matches(str(name), known, n=3, cutoff=0.5)
    available = f"available: {', '.join(known)}" if known else "none is available"
    return f"did you mean {' or '.join(near)}? {available}" if near else available
