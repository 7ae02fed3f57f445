"""Selector parser: errors point at the first character that does not fit."""

import re
from dataclasses import dataclass
from functools import lru_cache

from trocar_server.surgery.selectors.cursor import Cursor
from trocar_server.surgery.selectors.naming import ALL_PARAMETERS, PLAIN_ARGUMENT, PLAIN_NAME, PREFIXES, quote
from trocar_server.surgery.selectors.patterns import ANY
from trocar_server.surgery.selectors.regexes import InvalidPatternError, check_pattern
from trocar_server.surgery.selectors.selectors import ALL_CALLS, Order, Selector
from trocar_server.surgery.structure import Picks

_CLASS = re.compile(r"[A-Za-z_]\w*")
_WORD = re.compile(r"\w*")
_REST = re.compile(r".*", re.DOTALL)

_CALL_FORMS = "a call index: `@0`, `@-1` for the last, `@*` for all"
_ORDER_FORMS = "a place in execution order: `#0`, `#-1` for the last, `#3:7` for a range"
_PICK_FORMS = (
    'a position or a quoted key: `[0]`, `["out"]`; a set of characters is for a regular expression, which '
    "begins with `re:`"
)
_PARTS_IN_ORDER = "the parts of a selector come once and in this order: path:Type@call#order/port[pick]"
_REST_FORMS = "expected `:Type`, `@call`, `#order`, `/port`, `[pick]` or the end here"
_AFTER_ORDER = ("", ":", "@", "#", "/", "[")
_QUOTES = "; a name with such a character is written in double quotes"


@dataclass(frozen=True)
class _Kind:
    """The syntax that a kind of selector allows."""

    missing_path: str
    ports: tuple[str, ...]
    takes_type: bool = True
    takes_call: bool = True


_OF_MODULES = ("out", "in", "param", "pattern", "logits", "sink", "grad_out", "grad_in", "param_grad")
_KINDS = {
    "module": _Kind("a module path; the model itself is `/in` or `/out`", _OF_MODULES),
    "regex": _Kind(r"a regular expression, for example `re:layer\d\.0`", _OF_MODULES),
    "fx": _Kind("the name of a node, for example `fx:layer1.0.add`", ("out",), False, False),
    "fn": _Kind("the name of a function, for example `fn:softmax`", ("out", "in", "scores", "logits"), False),
}
_PORT_FORMS = {
    "out": "out",
    "in": "in, in(name)",
    "param": "param(name)",
    "scores": "scores",
    "pattern": "pattern",
    "logits": "logits",
    "sink": "sink",
    "grad_out": "grad_out",
    "grad_in": "grad_in, grad_in(name)",
    "param_grad": "param_grad(name)",
}
_GRADIENT_OF = {"grad_out": "out", "grad_in": "in", "param_grad": "param"}
_WITH_NAME = ("in", "param", "grad_in", "param_grad")


@lru_cache(maxsize=1024)
def parse_selector(text: str) -> Selector:
    """Parse a selector.

    Raises:
        ServiceError: `INVALID_SELECTOR`, pointing at the first character that does not fit.
    """
    cursor = Cursor(text)
    kind = next((kind for kind, prefix in PREFIXES.items() if prefix and cursor.take(prefix)), "module")
    start = cursor.position
    names = [(_regex(cursor), True)] if kind == "regex" else _names(cursor)
    path_end = cursor.position
    type_name = _type(cursor, _KINDS[kind], has_path=bool(names))
    call_at, call = cursor.position, _call(cursor, _KINDS[kind])
    order_at, order = cursor.position, _order(cursor)
    port, is_gradient = _port(cursor, _KINDS[kind])
    is_every_stage = kind == "module" and type_name is None and port is None and cursor.take("[*]")
    picks_at, picks = cursor.position, _picks(cursor)
    if port is not None and port.startswith("param("):
        _check_parameter(cursor, [(call_at, call), (order_at, order), (picks_at, picks or None)])
    if not names and not _may_lack_path(kind, call, order, port):
        raise cursor.invalid(f"expected {_KINDS[kind].missing_path}", start)
    if cursor.next:
        is_in_name = kind != "regex" and cursor.position == path_end
        rest = _REST_FORMS + (_QUOTES if is_in_name else "")
        raise cursor.invalid(_PARTS_IN_ORDER if cursor.next in ":@#/" else rest)
    return Selector(
        text=text,
        path=".".join(name for name, _ in names),
        kind=kind,
        type_name=type_name,
        call=call,
        order=order,
        port=port or "out",
        picks=picks,
        quoted=frozenset(i for i, (_, is_quoted) in enumerate(names) if is_quoted),
        is_gradient=is_gradient,
        is_every_stage=is_every_stage,
    )


def _may_lack_path(kind: str, call: int | str | None, order: Order | None, port: str | None) -> bool:
    if order is not None:
        return call is None
    return kind == "module" and port is not None


def _regex(cursor: Cursor) -> str:
    """Read a regular expression: quoted, or else the rest of the text."""
    start = cursor.position
    pattern = cursor.quoted() if cursor.next == '"' else cursor.match(_REST)
    if not pattern:
        raise cursor.invalid(f"expected {_KINDS['regex'].missing_path}", start)
    try:
        check_pattern(pattern)
    except InvalidPatternError as error:
        raise cursor.invalid(f"not a valid RE2 regular expression: {error}", start) from None
    except UnicodeEncodeError:
        raise cursor.invalid("half of a surrogate pair is not a character", start) from None
    return pattern


def _names(cursor: Cursor) -> list[tuple[str, bool]]:
    """Read the names of a path, each with whether it was quoted; none where there is no path."""
    names: list[tuple[str, bool]] = []
    while True:
        name = _name(cursor)
        if name is None and not names and cursor.next != ".":
            return names
        if name is None:
            raise cursor.invalid("expected a name before and after each dot")
        names.append(name)
        if not cursor.take("."):
            return names


def _name(cursor: Cursor) -> tuple[str, bool] | None:
    start = cursor.position
    if cursor.next == '"':
        name = cursor.quoted()
        if not name or "." in name:
            problem = (
                "a dot separates two names; quote each of them" if name else "no module has an empty name"
            )
            raise cursor.invalid(problem, start)
        return name, True
    plain = cursor.match(PLAIN_NAME)
    if plain is None:
        return None
    before_stars = plain if plain == ANY else plain.partition(ANY)[0]
    _check_characters(cursor, before_stars, start)
    if before_stars != plain:
        raise cursor.invalid("`**` must be a whole name between dots", start + len(before_stars))
    return plain, False


def _type(cursor: Cursor, kind: _Kind, *, has_path: bool) -> str | None:
    start = cursor.position
    if not cursor.take(":"):
        return None
    if not kind.takes_type:
        raise cursor.invalid("only modules have a class to filter by", start)
    name = cursor.match(_CLASS)
    if name is None:
        raise cursor.invalid("expected the name of a class after `:`, for example `:Conv2d`")
    if not has_path:
        raise cursor.invalid(f"expected a module path before the class; `**:{name}` is every {name}", start)
    return name


def _call(cursor: Cursor, kind: _Kind) -> int | str | None:
    start = cursor.position
    if not cursor.take("@"):
        return None
    if not kind.takes_call:
        raise cursor.invalid("a node is computed once, so it has no call index", start)
    return ALL_CALLS if cursor.take(ALL_CALLS) else cursor.number(_CALL_FORMS)


def _order(cursor: Cursor) -> Order | None:
    if not cursor.take("#"):
        return None
    start = None if cursor.next == ":" else cursor.number(_ORDER_FORMS)
    if not cursor.take(":"):
        return Order(start)
    stop = None if cursor.next in _AFTER_ORDER else cursor.number(_ORDER_FORMS)
    if cursor.next == ":":
        raise cursor.invalid("a range has a start and an end, and no step")
    return Order(start, stop, is_range=True)


def _port(cursor: Cursor, kind: _Kind) -> tuple[str | None, bool]:
    """Read the port of a value and whether it is a gradient port; None where absent."""
    if not cursor.take("/"):
        return None, False
    start = cursor.position
    word = cursor.match(_WORD) or ""
    if word not in kind.ports:
        available = ", ".join(_PORT_FORMS[port] for port in kind.ports)
        problem = f"no port {quote(word)} here" if word else "expected a port"
        raise cursor.invalid(f"{problem}; available: {available}", start)
    base, is_gradient = _GRADIENT_OF.get(word, word), word in _GRADIENT_OF
    if base == "param" and cursor.next != "(":
        raise cursor.invalid(f"expected the name of a parameter in parentheses: `/{word}(weight)`")
    if word not in _WITH_NAME or not cursor.take("("):
        return base, is_gradient
    return f"{base}({_argument(cursor, may_be_all=base == 'param')})", is_gradient


def _argument(cursor: Cursor, *, may_be_all: bool) -> str:
    """Read the name in `in(...)` or `param(...)` with the closing parenthesis."""
    start = cursor.position
    if cursor.next == '"':
        name = cursor.quoted()
    elif may_be_all and cursor.take("*)"):
        return ALL_PARAMETERS
    else:
        name = cursor.match(PLAIN_ARGUMENT) or ""
        _check_characters(cursor, name, start)
    if not name:
        raise cursor.invalid(
            "expected a name, for example `weight`; one with other characters in quotes", start
        )
    if not cursor.take(")"):
        raise cursor.invalid("expected `)`; a name has no dots, and other characters only in quotes")
    return name


def _picks(cursor: Cursor) -> Picks:
    picks: list[int | str] = []
    while cursor.take("["):
        is_key = cursor.next == '"'
        picks.append(cursor.quoted() if is_key else cursor.number(_PICK_FORMS))
        if not cursor.take("]"):
            raise cursor.invalid("expected `]`")
    return tuple(picks)


def _check_parameter(cursor: Cursor, parts: list[tuple[int, object]]) -> None:
    """Reject syntax of call values on a parameter."""
    for position, part in parts:
        if part is not None:
            raise cursor.invalid(
                "a parameter is no value of a call: no `@`, `#` or `[...]` with it", position
            )


def _check_characters(cursor: Cursor, name: str, start: int) -> None:
    """Reject characters that UTF-8 cannot encode in a reply."""
    for offset, char in enumerate(name):
        if "\ud800" <= char <= "\udfff":
            raise cursor.invalid("half of a surrogate pair is not a character", start + offset)
