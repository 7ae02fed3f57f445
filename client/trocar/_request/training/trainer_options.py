"""Selectors and options of trainers and fits, checked and turned into messages."""

import math
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import numpy as np
from google.protobuf.struct_pb2 import Struct

Selectors = str | Sequence[str]

_MOST_EXACT = 1 << 53
_LONGEST_SHOWN = 60


def selectors(chosen: Selectors, field: str = "selectors") -> list[str]:
    """Return one or several selectors as a list.

    Raises:
        TypeError: It is no text and no list of texts.
    """
    result: Any = [chosen] if isinstance(chosen, str) else chosen
    if isinstance(result, Sequence) and all(isinstance(entry, str) for entry in result):
        return [*result]
    raise TypeError(
        f"{field} is {shown(chosen)}; give one selector or a list of them, such as ['layer4', 'fc']"
    )


def options_to_wire(options: Mapping[str, object]) -> Struct:
    """Convert options by name to a message.

    Raises:
        TypeError: A value is no number, text, bool, None or list of these.
        ValueError: A number is not finite, or a whole one too large to arrive exactly.
    """
    message = Struct()
    message.update({name: _plain(name, value) for name, value in options.items()})
    return message


def _plain(name: str, value: object) -> Any:
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(name, entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(name, entry) for entry in value]
    if isinstance(value, int | float):
        return _number(name, value)
    if value is None or isinstance(value, str):
        return value
    raise TypeError(
        f"option {name} is a {type(value).__name__}; options are numbers, strings, bools and lists"
    )


def _number(name: str, value: float) -> float:
    """Check a number that the wire carries as a double, bools aside."""
    if isinstance(value, int):
        if abs(value) > _MOST_EXACT:
            raise ValueError(f"option {name} is {value}; whole numbers go up to 2^53")
    elif not math.isfinite(value):
        raise ValueError(f"option {name} is {value}; options are finite numbers")
    return value


def made_by(field: str, value: object, kinds: type | tuple[type, ...], advice: str) -> None:
    """Check the type of a trainer's part.

    Raises:
        TypeError: It is of another type.
    """
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"{field} is {shown(value)}; {advice}")


def several(chosen: Any, field: str) -> list[Any]:
    """Return one part or several as a list.

    Raises:
        TypeError: It is a mapping, or nothing that has parts.
    """
    if isinstance(chosen, list | tuple):
        return [*chosen]
    if chosen is None or isinstance(chosen, Mapping):
        raise TypeError(f"{field} is {shown(chosen)}; give one or a list of them")
    return [chosen]


def whole(field: str, value: Any, bits: int = 64) -> int:
    """Return an integer.

    Raises:
        TypeError: It is none.
        ValueError: It does not fit into its field.
    """
    try:
        result = index(value) if not isinstance(value, bool) else None
    except TypeError:
        result = None
    if result is None:
        raise TypeError(f"{field} is {shown(value)}; give a whole number")
    if not -(1 << bits - 1) <= result < 1 << bits - 1:
        raise ValueError(f"{field} is {result}, which is out of range")
    return result


def number(field: str, value: Any) -> float:
    """Return a number.

    Raises:
        TypeError: It is none.
        ValueError: It is not finite.
    """
    if isinstance(value, bool | str) or not hasattr(value, "__float__"):
        raise TypeError(f"{field} is {shown(value)}; give a number")
    result = float(value)
    if not math.isfinite(result):
        raise ValueError(f"{field} is {result}; give a finite number")
    return result


def optional_number(field: str, value: Any) -> float | None:
    """Return a number, or None as it is; raises what `number` does."""
    return None if value is None else number(field, value)


def text(field: str, value: Any) -> str:
    """Return a text.

    Raises:
        TypeError: It is none.
    """
    if not isinstance(value, str):
        raise TypeError(f"{field} is {shown(value)}; give a string")
    return value


def flag(field: str, value: Any) -> bool:
    """Return a bool.

    Raises:
        TypeError: It is neither True nor False.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{field} is {shown(value)}; give True or False")
    return bool(value)


def shown(value: object) -> str:
    text = repr(value)
    if isinstance(value, str | int | float) and len(text) <= _LONGEST_SHOWN:
        return text
    return "None" if value is None else f"a {type(value).__name__}"
