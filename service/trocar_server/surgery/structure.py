"""Values that are more than one tensor: tuples, dicts, dataclasses and what is inside.

A pick is the way to one element: a position in a tuple or list, a key of a dict, a field of a
dataclass, a named tuple or a plain object (torchvision's `ImageList`). `[0]["out"]` is written
as the picks `(0, "out")`.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

Picks = tuple[int | str, ...]

_ATOMS = (
    torch.Tensor,
    nn.Module,
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    torch.device,
    torch.dtype,
)


def leaves(value: Any, picks: Picks = ()) -> Iterator[tuple[Picks, Any]]:
    """Yield every leaf of a structure with its picks, in order; a plain value is its own leaf."""
    children = _children(value)
    if children is None:
        yield picks, value
        return
    for key, child in children:
        yield from leaves(child, (*picks, key))


def pick(value: Any, picks: Picks) -> Any:
    """Follow `picks` into a structure.

    Raises:
        KeyError: An element on the way does not exist.
    """
    for key in picks:
        children = dict(_children(value) or ())
        value = children[key + len(children) if isinstance(key, int) and key < 0 else key]
    return value


def format_picks(picks: Picks) -> str:
    """Write picks as in a selector: `[0]["out"]`."""
    return "".join(f"[{json.dumps(key, ensure_ascii=False)}]" for key in picks)


def _children(value: Any) -> list[tuple[int | str, Any]] | None:
    """Return the elements of a structure by key, or None for a leaf."""
    if isinstance(value, _ATOMS):
        return None
    if isinstance(value, Mapping):
        return [(key if isinstance(key, int) else str(key), child) for key, child in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, tuple | list):
        return list(enumerate(value))
    if hasattr(value, "__dict__") and not callable(value):
        return [(name, child) for name, child in vars(value).items() if not name.startswith("_")]
    return None
