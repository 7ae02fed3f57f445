"""Canonical selectors: the one name of a value."""

import json
import re

from trocar_server.surgery.structure import Picks, format_picks

PLAIN_NAME = re.compile(r'[^.:@#/\[\]"\s]+')
"""A name in a path that needs no quotes; a `*` in it is a pattern."""
PLAIN_ARGUMENT = re.compile(r'[^.:@#/\[\]()"*\s]+')
"""A name in `in(...)` and `param(...)` that needs no quotes."""

PREFIXES = {"module": "", "regex": "re:", "fx": "fx:", "fn": "fn:"}
"""The prefix of each kind of selector."""


ALL_PARAMETERS = ""
"""The parsed `*` of `param(*)`: every parameter and buffer of the module itself; of gradients, every
parameter. A name is never empty, and one may be a star."""

_GRADIENT_WORDS = {"out": "grad_out", "in": "grad_in", "param": "param_grad"}


def gradient_port(port: str) -> str:
    """Return the port of the gradient with respect to a value: `grad_in(x)` for `in(x)`."""
    word, name = split_port(port)
    return _GRADIENT_WORDS[word] + ("" if name is None else f"({name})")


def canonical_name(
    path: str, call: int | None, port: str, picks: Picks, kind: str = "module", *, is_gradient: bool = False
) -> str:
    """Write the selector of exactly one value; `call` is None where there is a single call."""
    show_port = port != "out" or not path or is_gradient
    port = gradient_port(port) if is_gradient else port
    return (
        f"{PREFIXES[kind]}{shown_path(path)}{'' if call is None else f'@{call}'}"
        f"{f'/{shown_port(port)}' if show_port else ''}{format_picks(picks)}"
    )


def shown_path(path: str) -> str:
    """Write a literal path, with quotes around the names that need them."""
    return ".".join(shown_name(name) for name in path.split("."))


def shown_name(name: str) -> str:
    """Write one name of a literal path."""
    is_plain = not name or (PLAIN_NAME.fullmatch(name) is not None and "*" not in name)
    return name if is_plain else quote(name)


def shown_port(port: str) -> str:
    """Write a port, with quotes around the name in `in(...)` and `param(...)` where needed."""
    word, name = split_port(port)
    if name is None:
        return word
    return f"{word}({name if PLAIN_ARGUMENT.fullmatch(name) else quote(name)})"


def split_port(port: str) -> tuple[str, str | None]:
    """Return a port's keyword and the name in parentheses, or None: `param(weight)`, `in`."""
    word, parenthesis, rest = port.partition("(")
    return word, rest[:-1] if parenthesis else None


def quote(text: str) -> str:
    """Write a text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)
