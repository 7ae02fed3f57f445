"""Edits as JSON and in configuration files: mappings, with arrays as lists."""

import json
from collections.abc import Mapping
from typing import Any, cast

from trocar._base.delegation import explained
from trocar._base.names import name_hint
from trocar._request.edit_operations import COMMON_OPTIONS, OPERATIONS, EditOperation, operation_options
from trocar._request.edits import Edit, edit
from trocar._request.positions import TextSpan, span
from trocar._request.reductions import ROLES
from trocar._request.stored.stored_edits import check_edits_name
from trocar._request.text_positions import TextPositions, positions

_AXES = ("channels", "samples", "tokens")
_SWAPPED_AT = {"from": "at"}  # `at` is where the edit is


@explained
def edits_from_json(text: str | bytes) -> list[Edit | str]:
    """Read edits from a JSON text: one edit or a list of them.

        edits_from_json('[{"at": "layer3", "op": "scale", "factor": 0.0, "channels": [1, 2]}, "ablate-3"]')

    Args:
        text: Mappings as `Edit.from_json` takes them, and names of stored edits.

    Raises:
        TypeError: An entry is neither, or what `Edit.from_json` raises.
        ValueError: The text is no JSON, or what `Edit.from_json` raises; with the number of the edit.
    """
    try:
        entries = json.loads(text, parse_constant=_refuse_constant)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is not JSON: {error}") from error
    if not isinstance(entries, list):
        return [_edit(entries)]
    result: list[Edit | str] = []
    for number, entry in enumerate(entries):
        try:
            result.append(_edit(entry))
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            raise kind(f"edit {number} of the list: {error}") from error
    return result


def edit_from_mapping(mapping: Mapping[str, Any]) -> Edit:
    """Return the edit that a mapping describes; see `Edit.from_json`."""
    missing = [key for key in ("at", "op") if key not in mapping]
    if missing:
        raise TypeError(f"an edit has {' and '.join(missing)}; for example {_EXAMPLE}")
    options = {key: value for key, value in mapping.items() if key not in ("at", "op")}
    operation = mapping["op"]
    if not isinstance(operation, str) or operation not in OPERATIONS:
        raise ValueError(f"no operation {operation!r}; {name_hint(operation, OPERATIONS)}")
    names = {json_name(option): option for option in operation_options(operation)}
    unknown = next((key for key in options if key not in names and key not in COMMON_OPTIONS), None)
    if unknown is not None:
        raise TypeError(
            f"an edit of {operation} has no {unknown!r}; {name_hint(unknown, (*names, *COMMON_OPTIONS))}"
        )
    for axis in _AXES:
        if isinstance(options.get(axis), str) and not (axis == "tokens" and options[axis] in ROLES):
            options[axis] = _slice(axis, options[axis])
    options.update({"tokens": _tokens(options["tokens"])} if "tokens" in options else {})
    if "positions" in options:
        options["positions"] = _text_positions(options["positions"])
    if "index" in options:
        options["index"] = _index(options["index"])
    checked = cast("EditOperation", operation)  # `edit` refuses a name that it does not know
    return edit(mapping["at"], checked, **{names.get(key, key): value for key, value in options.items()})


_EXAMPLE = '{"at": "layer3", "op": "scale", "factor": 0.0, "channels": [1, 2]}'


def _edit(entry: Any) -> Edit | str:
    if isinstance(entry, str):
        return check_edits_name(entry)
    if not isinstance(entry, Mapping):
        raise TypeError(f"an edit must be a mapping or the name of stored edits, not {entry!r}")
    return edit_from_mapping(entry)


def _tokens(written: Any) -> Any:
    """Return the spans of mappings; anything else as it is."""
    if isinstance(written, list):
        return [_tokens(entry) for entry in written]
    return _span(written) if isinstance(written, Mapping) else written


def _span(written: Mapping[str, Any]) -> TextSpan:
    decoder = bool(written.get("decoder", False))
    match {key: value for key, value in written.items() if key != "decoder"}:
        case {"text": str(text), **rest} if not rest:
            return span(text, decoder=decoder)
        case {"role": str(role), **rest} if not rest:
            return span(role=role, decoder=decoder)
        case {"characters": [int(start), int(stop)], **rest} if not rest:
            return span(start, stop, decoder=decoder)
    raise TypeError(
        f'a span is {{"text": "cat"}}, {{"characters": [4, 9]}} or {{"role": "user"}}, not {dict(written)!r}'
    )


_CLAUSES = ("prompt", "generated", "spans", "roles", "token_ids", "but_not")


def _text_positions(written: object) -> TextPositions:
    """Return the positions of a mapping, with the arguments of `trocar.positions`."""
    if not isinstance(written, Mapping) or not set(written) <= set(_CLAUSES):
        raise TypeError(f'positions are for example {{"prompt": [-1], "generated": "0:8"}}, not {written!r}')
    clauses: dict[str, Any] = dict(written)
    for name in ("prompt", "generated"):
        if isinstance(clauses.get(name), str) and clauses[name] != "all":
            clauses[name] = _slice(name, clauses[name])
    if "spans" in clauses:
        listed = clauses["spans"] if isinstance(clauses["spans"], list) else [clauses["spans"]]
        clauses["spans"] = [_span(each) if isinstance(each, Mapping) else each for each in listed]
    if "but_not" in clauses:
        clauses["but_not"] = _text_positions(clauses["but_not"])
    return positions(**clauses)


def json_name(option: str) -> str:
    """Return the name of an option in JSON."""
    return next((key for key, name in _SWAPPED_AT.items() if name == option), option)


def _index(written: object) -> Any:
    """Return the index expression that a text such as `:, 3:8` means; numbers, and lists of both, too."""
    items = written.strip().strip("[]").split(",") if isinstance(written, str) else written
    if not isinstance(items, list):
        return items
    return tuple(_item(item.strip()) if isinstance(item, str) else item for item in items)


def _item(written: str) -> Any:
    if written == "...":
        return ...
    return _slice("index", written) if ":" in written else _whole("index", written)


def _slice(name: str, written: str) -> slice | int:
    parts = written.split(":")
    if len(parts) > 3:
        raise ValueError(f'{name} has {written!r}; a slice is written "start:stop" or "start:stop:step"')
    if len(parts) == 1:
        return _whole(name, written)
    return slice(*(_whole(name, part) if part.strip() else None for part in parts))


def _whole(name: str, written: str) -> int:
    try:
        return int(written)
    except ValueError:
        raise ValueError(f'{name} has {written!r}; write whole numbers, "2:8" or "..."') from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a finite number; edits take finite numbers only")
