"""Selector quoting: quotes where names need them."""

import json
import re
from collections.abc import Iterable
from typing import Literal, SupportsIndex

from trocar._base.delegation import explained
from trocar_api.value_words import not_one_of

Kind = Literal["module", "pattern", "regex", "fx", "fn"]

_PREFIXES: dict[str, str] = {"module": "", "pattern": "", "regex": "re:", "fx": "fx:", "fn": "fn:"}
_WORDS = frozenset(("re", "fx", "fn"))  # before a colon they are the kind

_PLAIN_NAME = re.compile(r'[^.:@#/\[\]"\s]+')
_PLAIN_ARGUMENT = re.compile(r'[^.:@#/\[\]()"*\s]+')
_TYPE = re.compile(r"[A-Za-z_]\w*")
_PORT = re.compile(
    r"(out|in|scores|pattern|logits|sink|grad_out|grad_in)|(in|param|grad_in|param_grad)\((.+)\)",
    re.DOTALL,
)
_PORTS = (
    "out, in, in(name), param(name), scores, pattern, logits, sink, grad_out, grad_in, grad_in(name), "
    "param_grad(name)"
)
_WITH_ALL = frozenset(("param", "param_grad"))  # in which a star stands for every parameter


@explained
def selector(
    path: str,
    *,
    kind: Kind = "module",
    type: str | None = None,
    call: int | Literal["*"] | None = None,
    port: str = "out",
    picks: Iterable[int | str] = (),
) -> str:
    """Build a selector from its parts, with quotes around names that need them.

        trocar.selector("blocks.a:b", port="in")                        # 'blocks."a:b"/in'
        trocar.selector("layer*.0.relu", kind="pattern", call=-1)       # 'layer*.0.relu@-1'
        trocar.selector("", picks=["out"])                              # '/out["out"]'

    Args:
        path: A path of the given `kind`; "" with kind "module" is the model itself. Names are separated by
            dots.
        kind: "module" for an exact module path, in which a star is literal; "pattern" for one with `*` and
            `**`; "regex" for a regular expression that matches whole module paths; "fx" for a node of the
            traced graph and "fn" for a function, both optionally with `*`.
        type: The class that a module must have.
        call: Which call, negative from the last; "*" for all.
        port: "out", "in", "in(name)" for a keyword input, "param(name)", "pattern", "logits" and "sink" of a
            module's attention, "scores" of an attention function; or a gradient, "grad_out", "grad_in",
            "grad_in(name)", "param_grad(name)". "param(*)" and "param_grad(*)" are all of the module itself.
        picks: The element of a structured value: positions, negative from the end, and keys.

    Returns:
        The selector as text. The server validates it.

    Raises:
        ValueError: A kind, type, call or port that there is not.
    """
    if kind not in _PREFIXES:
        raise ValueError(f"kind {not_one_of(kind, _PREFIXES)}")
    if type is not None and not _TYPE.fullmatch(type):
        raise ValueError(f"type={type!r} is not the name of a class")
    steps = [picks] if isinstance(picks, str) else picks
    return "".join(
        (
            _PREFIXES[kind] + _path(path, kind),
            "" if type is None else f":{type}",
            "" if call is None else f"@{_call(call)}",
            _port(port) if port != "out" or not path else "",
            *(f"[{_quoted(step) if isinstance(step, str) else int(step)}]" for step in steps),
        )
    )


def _path(path: str, kind: str) -> str:
    if kind == "regex":
        return _quoted(path)
    if kind == "module" and path in _WORDS:
        return _quoted(path)
    return ".".join(_name(name, has_stars=kind != "module") for name in path.split("."))


def _name(name: str, *, has_stars: bool) -> str:
    is_plain = not name or (_PLAIN_NAME.fullmatch(name) is not None and (has_stars or "*" not in name))
    return name if is_plain else _quoted(name)


def _call(call: object) -> object:
    if call == "*" or (isinstance(call, SupportsIndex) and not isinstance(call, bool)):
        return call
    raise ValueError(f'call={call!r} is neither a whole number nor "*"')


def _port(port: str) -> str:
    match = _PORT.fullmatch(port)
    if match is None:
        raise ValueError(f"port={port!r} is not one of {_PORTS}")
    word, word_of_name, name = match.groups()
    if word is not None:
        return f"/{word}"
    is_plain = _PLAIN_ARGUMENT.fullmatch(name) or (name == "*" and word_of_name in _WITH_ALL)
    return f"/{word_of_name}({name if is_plain else _quoted(name)})"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
