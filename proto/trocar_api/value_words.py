"""Why a value is refused, in the same words at both ends.

    refusal("int_parsing", {}, "x")                     # "must be a whole number, not 'x'"
    refusal("less_than_equal", {"le": 65535}, 99999)    # "must be at most 65535, not 99999"
    not_one_of("fst", ["off", "fast"])                  # "must be one of off, fast, not 'fst'; nearest: fast"

The kinds of refusals have pydantic's names: it reads configurations, specifications and command lines, and
its own texts are for programmers.
"""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

_MOST_SHOWN = 60
"""Characters of a value in a message."""

_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "decimal": "a number",
    "bool": "true or false",
    "string": "a text",
    "path": "a path",
    "tuple": "a list",
    "list": "a list",
    "set": "a list",
    "frozen_set": "a list",
    "dict": "a table of names and values",
    "mapping": "a table of names and values",
    "model": "a table of names and values",
    "model_attributes": "a table of names and values",
    "dataclass": "a table of names and values",
    "json": "JSON",
}
"""What is expected, by the beginning of a kind."""
_PLAIN = {"missing": "is required", "extra_forbidden": "is unknown"}
"""Refusals without a value."""
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("more than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
    "multiple_of": ("a multiple of", "multiple_of"),
}
"""Words for a bound, and its name in the facts."""
_KIND = re.compile(r"(?P<kind>[a-z_]+?)_(type|parsing|parsing_size|from_float|unicode|sub_type|invalid)")
_ALTERNATIVE = re.compile(r"(bool|int|float|str|none)|(list|tuple|dict|set|frozenset)\[.*\]|function-.*")
"""A part of a place that names an alternative of a union."""
_ALTERNATIVES = re.compile(r"'([^']*)'")


def refusals(errors: Iterable[Mapping[str, Any]]) -> list[tuple[tuple[int | str, ...], str]]:
    """Return the place and the reason of each refused value.

    The errors about the alternatives of one value, as a number or a text, become one.

    Args:
        errors: Of `pydantic.ValidationError.errors()`.
    """
    by_place: dict[tuple[int | str, ...], list[Mapping[str, Any]]] = {}
    for error in errors:
        by_place.setdefault(_place(error), []).append(error)
    return [(place, _of_alternatives(alike)) for place, alike in by_place.items()]


def refusal(kind: str, facts: Mapping[str, Any], value: object, text: str = "") -> str:
    """Say why a value is refused, without its name.

    Args:
        kind: What is wrong with it, as pydantic calls it, for example "int_parsing".
        facts: Its details, for example the bound.
        value: The value.
        text: The words to use for a kind that is not known here.
    """
    if kind in _PLAIN:
        return _PLAIN[kind]
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        plain = value.strip() if isinstance(value, str) else value
        return f"must be {words} {_number(facts.get(name))}{_but(value, str(plain))}"
    if kind in ("literal_error", "enum"):
        return not_one_of(value, _ALTERNATIVES.findall(str(facts.get("expected", ""))))
    if kind in ("too_long", "too_short", "string_too_short", "string_too_long"):
        units = ("character", "characters") if kind.startswith("string") else ("entry", "entries")
        return _of_length(facts, *units)
    expected = _expected(kind)
    if expected:
        return f"must be {expected}{_but(value)}"
    return text.removeprefix("Value error, ").removeprefix("Assertion failed, ").rstrip(".") or "is not valid"


def not_one_of(value: object, names: Iterable[str]) -> str:
    """Say that a value is not one of some words, and which of them is nearest."""
    words = [name or "''" for name in names]
    near = nearest_word(value, words)
    rest = f"; nearest: {near}" if near and len(words) > 1 else ""
    return f"must be {'one of ' if len(words) > 1 else ''}{', '.join(words)}{_but(value)}{rest}"


def nearest_word(value: object, words: Iterable[str]) -> str:
    """Return the word that looks most like a value; empty if none does."""
    by_lower = {word.lower(): word for word in words}
    near = get_close_matches(str(value).lower(), by_lower, n=1, cutoff=0.6) if isinstance(value, str) else []
    return by_lower[near[0]] if near else ""


def either(words: Iterable[str]) -> str:
    """List alternatives: `a, b or c`."""
    shown = list(words)
    return f"{', '.join(shown[:-1])} or {shown[-1]}" if len(shown) > 1 else "".join(shown)


def shown_value(value: object) -> str:
    """Return a short value for a message; empty for a long one and for lists and tables."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if value is None:
        return "None"
    is_plain = isinstance(value, str | int | float)
    return repr(value) if is_plain and len(repr(value)) <= _MOST_SHOWN else ""


def _but(value: object, plain: str = "") -> str:
    """Return the end of a sentence that names the value, or what it is in plain text."""
    shown = shown_value(value) and (plain or shown_value(value))
    return f", not {shown}" if shown else ""


def _number(value: object) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _of_length(facts: Mapping[str, Any], unit: str, plural: str) -> str:
    words, bound = ("at most", "max_length") if "max_length" in facts else ("at least", "min_length")
    count = _number(facts.get(bound))
    return f"must have {words} {count} {unit if count == '1' else plural}"


def _expected(kind: str) -> str:
    """Return what a kind of refusal expects; empty if it is about something else."""
    if kind == "finite_number":
        return "a finite number"
    match = _KIND.fullmatch(kind)
    return "" if match is None else _EXPECTED.get(match["kind"], "")


def _place(error: Mapping[str, Any]) -> tuple[int | str, ...]:
    """Return where a value is, without the alternative of a union that refuses it."""
    place: tuple[int | str, ...] = tuple(error["loc"])
    for at in range(len(place) - 1, 0, -1):
        part = place[at]
        if isinstance(part, str):
            return place[:at] if _ALTERNATIVE.fullmatch(part) else place
    return place


def _of_alternatives(errors: list[Mapping[str, Any]]) -> str:
    """Return the reason of one value, which each alternative of a union refuses for one of its own."""
    expected = list(dict.fromkeys(_expected(error["type"]) for error in errors))
    if len(errors) > 1 and all(expected):
        is_whole_value = len({len(error["loc"]) for error in errors}) == 1
        return f"must be {either(expected)}{_but(errors[0].get('input')) if is_whole_value else ''}"
    first = errors[0]
    return refusal(first["type"], first.get("ctx") or {}, first.get("input"), first["msg"])
