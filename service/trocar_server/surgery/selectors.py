"""The selector grammar: which module, which call, which port, which element.

    path[:Type][@call][/port][[pick]...]

`layer4`, `layer*.0.relu@1`, `encoder.**:Conv2d`, `fc/in`, `/in[0]`, `out_proj/in(query)`, `head["out"]`.
`*` stands for anything within one path component, `**` for any number of components (a trailing
`.**` for everything inside, as in gitignore). A name with other characters stands in JSON's quotes and means
itself: `parts."a:b"`. The empty path is the model itself and needs a port: `/in`, `/out`.
"""

import json
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery.patterns import ANY, matches_path
from trocar_server.surgery.structure import Picks, format_picks

ALL_CALLS = "*"

_NAME = re.compile(r'[^.:@/\[\]"\s]+|"(?:[^"\\]|\\.)*"')
_TYPE = re.compile(r":([A-Za-z_]\w*)")
_CALL = re.compile(r"@(-?\d{1,9}|\*)")
_PORT = re.compile(r"/(?:(out)|(in)(?:\(([A-Za-z_]\w*)\))?)(?=\[|$)")
_PICK = re.compile(r"\[(?:(-?\d{1,9})|(\"(?:[^\"\\]|\\.)*\"))\]")


@dataclass(frozen=True)
class Selector:
    """A parsed selector.

    Attributes:
        text: As it was written.
        path: Module path, `*` and `**` allowed; empty for the model itself.
        type_name: Class name that the module must have, or None.
        call: Call index (negative counts from the last), `"*"` for all calls, or None when not said.
        port: `out`, `in`, or `in(name)` for a keyword input.
        picks: The way into a structured value; empty for the whole.
        quoted: Positions of the path's components that mean themselves, `*` included.
    """

    text: str
    path: str
    type_name: str | None = None
    call: int | str | None = None
    port: str = "out"
    picks: Picks = ()
    quoted: frozenset[int] = frozenset()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The components of the path."""
        return tuple(self.path.split("."))

    @cached_property
    def is_pattern(self) -> bool:
        """Whether it may stand for several modules."""
        has_star = any("*" in name for i, name in enumerate(self.names) if i not in self.quoted)
        return has_star or self.type_name is not None

    def matches(self, path: str, type_name: str) -> bool:
        """Whether a module of this path and class is meant."""
        if self.type_name is not None and self.type_name != type_name:
            return False
        return matches_path(self.names, path.split("."), self.quoted)


@lru_cache(maxsize=1024)
def parse_selector(text: str) -> Selector:
    """Parse a selector.

    Raises:
        ServiceError: `INVALID_SELECTOR`, pointing at the first character that does not fit.
    """
    names, position = _parse_path(text)

    def take(pattern: re.Pattern[str]) -> re.Match[str] | None:
        nonlocal position
        match = pattern.match(text, position)
        position = match.end() if match else position
        return match

    type_name, call, port = take(_TYPE), take(_CALL), take(_PORT)
    picks: list[int | str] = []
    while match := take(_PICK):
        picks.append(_pick_key(text, match))
    if position != len(text):
        raise _invalid(text, position, "expected `:Type`, `@call`, `/port` or `[pick]` here")
    if not names and port is None:
        raise _invalid(text, 0, "expected a module path; the model itself is `/in` or `/out`")
    return Selector(
        text=text,
        path=".".join(name for name, _ in names),
        type_name=type_name.group(1) if type_name else None,
        call=_call_index(call.group(1)) if call else None,
        port=port.group()[1:] if port else "out",
        picks=tuple(picks),
        quoted=frozenset(i for i, (_, is_quoted) in enumerate(names) if is_quoted),
    )


def canonical_name(path: str, call: int | None, port: str, picks: Picks) -> str:
    """Write the selector that stands for one value alone; `call` is None for a module called once."""
    shown = ".".join(_shown_name(name) for name in path.split("."))
    show_port = port != "out" or not path
    return (
        f"{shown}{'' if call is None else f'@{call}'}{f'/{port}' if show_port else ''}{format_picks(picks)}"
    )


def _parse_path(text: str) -> tuple[list[tuple[str, bool]], int]:
    """Return the names of the path, each with whether it was quoted, and the position after it."""
    names: list[tuple[str, bool]] = []
    match = _NAME.match(text)
    if match is None and not text.startswith("."):
        return names, 0
    position = 0
    while True:
        match = _NAME.match(text, position)
        if match is None:
            raise _invalid(text, position, "expected a name between the dots")
        names.append(_name(text, match))
        position = match.end()
        if not text.startswith(".", position):
            return names, position
        position += 1


def _name(text: str, match: re.Match[str]) -> tuple[str, bool]:
    name = match.group()
    if name.startswith('"'):
        name = _unquoted(text, match.start(), name)
        if not name or "." in name:
            raise _invalid(text, match.start(), "no module has such a name")
        return name, True
    if ANY in name and name != ANY:
        raise _invalid(text, match.start() + name.index(ANY), "`**` must be a whole component")
    return name, False


def _shown_name(name: str) -> str:
    match = _NAME.fullmatch(name)
    is_plain = not name or (match is not None and not name.startswith('"') and "*" not in name)
    return name if is_plain else json.dumps(name, ensure_ascii=False)


def _pick_key(text: str, match: re.Match[str]) -> int | str:
    if match.group(1) is not None:
        return int(match.group(1))
    return _unquoted(text, match.start(), match.group(2))


def _unquoted(text: str, position: int, quoted: str) -> str:
    try:
        value = str(json.loads(quoted))
        value.encode()  # a lone surrogate could not be sent back
    except ValueError:
        raise _invalid(text, position, "expected text in JSON's quotes") from None
    return value


def _call_index(text: str) -> int | str:
    return ALL_CALLS if text == ALL_CALLS else int(text)


def _invalid(text: str, position: int, problem: str) -> ServiceError:
    shown = text if len(text) <= 200 else text[:200] + "..."
    return ServiceError(
        ErrorReason.INVALID_SELECTOR,
        f"selector '{shown}': {problem} (character {position + 1})\n  {shown}\n  {' ' * min(position, 200)}^",
        selector=shown,
        position=str(position),
    )
