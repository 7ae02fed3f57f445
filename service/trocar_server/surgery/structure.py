"""Nested values: tuples, dicts, dataclasses and the tensors inside.

A pick is the path to one element: a position in a tuple or list, a key of a dict, a field of a
dataclass, a named tuple or a plain object (torchvision's `ImageList`). `[0]["out"]` is written
as the picks `(0, "out")`.
"""

import copy
import dataclasses
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
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
)


def leaves(
    value: Any, picks: Picks = (), above: frozenset[int] = frozenset(), *, with_empty: bool = False
) -> Iterator[tuple[Picks, Any]]:
    """Yield every leaf of a structure with its picks, in order; a plain value is its own leaf.

    Args:
        value: The structure.
        picks: The path to it.
        above: Ids of the enclosing structures; a structure inside itself is a leaf.
        with_empty: Whether an empty structure inside another one is a leaf: positions from the end count it.
    """
    children = None if id(value) in above else _children(value)
    if children is None or (with_empty and picks and not children):
        yield picks, value
        return
    for key, child in children.items():
        yield from leaves(child, (*picks, key), above | {id(value)}, with_empty=with_empty)


def pick(value: Any, picks: Picks) -> Any:
    """Follow `picks` into a structure. A negative position counts from the end, unless it is a key.

    Raises:
        KeyError: An element on the way does not exist.
    """
    for key in picks:
        children = _children(value) or {}
        is_from_end = isinstance(key, int) and key < 0 and key not in children
        value = children[key + len(children) if is_from_end and isinstance(key, int) else key]
    return value


def format_picks(picks: Picks) -> str:
    """Write picks as in a selector: `[0]["out"]`."""
    return "".join(f"[{json.dumps(key, ensure_ascii=False)}]" for key in picks)


def _children(value: Any) -> dict[int | str, Any] | None:
    """Return the elements of a structure by key, or None for a leaf."""
    if isinstance(value, _ATOMS):
        return None
    if isinstance(value, Mapping):
        return {int(key) if isinstance(key, int) else str(key): child for key, child in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, tuple) and (names := getattr(value, "_fields", None)):
        return dict(zip(names, value, strict=True))
    if isinstance(value, tuple | list):
        return dict(enumerate(value))
    if hasattr(value, "__dict__") and not callable(value):
        return {name: child for name, child in vars(value).items() if not name.startswith("_")} or None
    return None


def put(value: Any, picks: Picks, new: Any) -> Any:
    """Return a structure with another element at `picks`; enclosing structures are copied.

    Raises:
        KeyError, ValueError: An element on the way does not exist.
        TypeError: A structure on the way cannot be rebuilt.
    """
    if not picks:
        return new
    children = _children(value) or {}
    key = picks[0]
    if isinstance(key, int) and key < 0 and key not in children:
        key += len(children)
    return _with_child(value, list(children).index(key), key, put(children[key], picks[1:], new))


def _with_child(value: Any, position: int, key: int | str, child: Any) -> Any:
    """Return a copy of a structure with one child replaced."""
    if isinstance(value, Mapping):
        copied = copy.copy(value)
        copied[list(value)[position]] = child  # type: ignore[index]  # models return mutable ones
        return copied
    if isinstance(value, tuple | list):
        items = [child if index == position else item for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple_like(value, items)
    copied = copy.copy(value)
    object.__setattr__(copied, str(key), child)  # a frozen dataclass, too
    return copied


def tuple_like(value: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    """Return a tuple of other items, of the same type where it names them."""
    if hasattr(value, "_fields"):
        return type(value)(*items)
    is_struct_sequence = hasattr(value, "n_sequence_fields")  # torch.return_types
    return type(value)(items) if is_struct_sequence else tuple(items)
