"""Nested names: inputs within a dictionary or a list that is one argument of a forward.

    parse_name('batch["image"]')                     # ("batch", ("image",))
    nested(['batch["image"]', 'batch["sizes"][0]'], [image, first])
    # (["batch"], [{"image": image, "sizes": [first]}])

The steps behind the argument's name are those of selectors: a position, or a key as a JSON string. Everywhere
else an input with such a name is as any other.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

Steps: TypeAlias = tuple[int | str, ...]

MAX_DEPTH = 8
"""Dictionaries and lists within each other."""

_STEP = re.compile(r'\[(?:(\d{1,4})|("(?:[^"\\]|\\.)*"))\]')


def is_nested(name: str) -> bool:
    """Whether a name is that of an input within an argument."""
    return "[" in name


@lru_cache(4096)
def parse_name(name: str) -> tuple[str, Steps]:
    """Return the argument's name, empty where it is positional, and the steps into it.

    Raises:
        ValueError: It is no such name.
    """
    root, bracket, _ = name.partition("[")
    steps: list[int | str] = []
    position = len(root)
    while bracket and position < len(name):
        match = _STEP.match(name, position)
        if match is None or len(steps) == MAX_DEPTH:
            raise _unreadable(name)
        steps.append(int(match[1]) if match[1] else _key(name, match[2]))
        position = match.end()
    return root, tuple(steps)


def _key(name: str, written: str) -> str:
    try:
        return str(json.loads(written))
    except ValueError:  # an escape that JSON does not have
        raise _unreadable(name) from None


def _unreadable(name: str) -> ValueError:
    return ValueError(
        f'{name[:80]!r} is no name of an input; write `argument[0]` or `argument["key"]`, with at most '
        f"{MAX_DEPTH} steps"
    )


def nested(names: Sequence[str], values: Sequence[object]) -> tuple[list[str], list[object]]:
    """Return arguments with dictionaries and lists in place of the inputs within them.

    Raises:
        ValueError: Names contradict each other, or a position of a list is missing.
    """
    result: dict[str, list[tuple[Steps, object]]] = {}
    arguments: list[tuple[str, object]] = []
    for name, value in zip(names, values, strict=True):
        if not is_nested(name):
            arguments.append((name, value))
            continue
        root, steps = parse_name(name)
        if root not in result:
            result[root] = []
            arguments.append((root, result[root]))
        result[root].append((steps, value))
    plain = {name for name in names if name and not is_nested(name)}
    if twice := sorted(plain & set(result)):
        raise ValueError(f"'{twice[0]}' is given, and inputs within it too; give one or the other")
    built = [
        _built(name, value) if isinstance(value, list) and value is result.get(name) else value
        for name, value in arguments
    ]
    return [name for name, _ in arguments], built


def flattened(names: Sequence[str], values: Sequence[Any]) -> tuple[list[str], list[Any]]:
    """Return the inputs within arguments, by name: the reverse of `nested`. Lists without structures stay."""
    inputs: list[tuple[str, Any]] = []
    for name, value in zip(names, values, strict=True):
        within = _within(value)
        if within is None:
            inputs.append((name, value))
            continue
        result = flattened([f"{name}[{json.dumps(step)}]" for step in within], list(within.values()))
        inputs += zip(*result, strict=True)
    return [name for name, _ in inputs], [value for _, value in inputs]


def _within(value: object) -> Mapping[int | str, object] | None:
    """Return what a structure holds, by step; None for an input."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list) and any(isinstance(part, dict | list) for part in value):
        return dict(enumerate(value))
    return None


def _built(name: str, leaves: Sequence[tuple[Steps, object]]) -> object:
    """Return the dictionary or list of what is within it; or the value itself, where no step is left."""
    shown = name or "the first argument"
    if not all(steps for steps, _ in leaves):
        if len(leaves) > 1:
            raise ValueError(f"'{shown}' is given twice, or inputs within it too")
        return leaves[0][1]
    groups: dict[int | str, list[tuple[Steps, object]]] = {}
    for steps, value in leaves:
        groups.setdefault(steps[0], []).append((steps[1:], value))
    built = {step: _built(f"{name}[{json.dumps(step)}]", group) for step, group in groups.items()}
    kinds = {type(step) for step in built}
    if len(kinds) > 1:
        raise ValueError(f"'{shown}' has positions and keys; it is a list or a dictionary")
    if kinds == {str}:
        return built
    missing = next((place for place in range(len(built)) if place not in built), None)
    if missing is not None:
        raise ValueError(f"'{shown}' has no position {missing}; a list has all of them, from 0")
    return [built[place] for place in range(len(built))]
