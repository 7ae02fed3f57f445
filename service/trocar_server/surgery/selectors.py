"""The selector grammar: which module, which call, which port, which element.

    path[:Type][@call][/port][[pick]...]

`layer4`, `layer*.0.relu@1`, `encoder.**:Conv2d`, `fc/in`, `/in[0]`, `out_proj/in(query)`, `head["out"]`.
`*` stands for anything within one path component, `**` for any number of components (a trailing
`.**` for everything inside, as in gitignore). The empty path is the model itself and needs a port:
`/in`, `/out`.
"""

import json
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery.structure import Picks, format_picks

ALL_CALLS = "*"

_PATH = re.compile(r"[^:@/\[\]]*")
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
    """

    text: str
    path: str
    type_name: str | None = None
    call: int | str | None = None
    port: str = "out"
    picks: Picks = ()

    @property
    def is_pattern(self) -> bool:
        """Whether it may stand for several modules."""
        return "*" in self.path or self.type_name is not None

    @cached_property
    def path_regex(self) -> re.Pattern[str]:
        """The path as a regular expression over whole module paths."""
        return re.compile(_path_regex(self.path))

    def matches(self, path: str, type_name: str) -> bool:
        """Whether a module of this path and class is meant."""
        if self.type_name is not None and self.type_name != type_name:
            return False
        return self.path == path or (self.is_pattern and self.path_regex.fullmatch(path) is not None)


@lru_cache(maxsize=1024)
def parse_selector(text: str) -> Selector:
    """Parse a selector.

    Raises:
        ServiceError: `INVALID_SELECTOR`, pointing at the first character that does not fit.
    """
    position = 0

    def take(pattern: re.Pattern[str]) -> re.Match[str] | None:
        nonlocal position
        match = pattern.match(text, position)
        position = match.end() if match else position
        return match

    path = take(_PATH)
    type_name, call, port = take(_TYPE), take(_CALL), take(_PORT)
    picks: list[int | str] = []
    while match := take(_PICK):
        picks.append(_pick_key(text, match))
    if position != len(text):
        raise _invalid(text, position, "expected `:Type`, `@call`, `/port` or `[pick]` here")
    selector = Selector(
        text=text,
        path=path.group() if path else "",
        type_name=type_name.group(1) if type_name else None,
        call=_call_index(call.group(1)) if call else None,
        port=port.group()[1:] if port else "out",
        picks=tuple(picks),
    )
    _check_path(selector, has_port=port is not None)
    return selector


def canonical_name(path: str, call: int | None, port: str, picks: Picks) -> str:
    """Write the selector that stands for one value alone; `call` is None for a module called once."""
    show_port = port != "out" or not path
    return f"{path}{'' if call is None else f'@{call}'}{f'/{port}' if show_port else ''}{format_picks(picks)}"


def _check_path(selector: Selector, *, has_port: bool) -> None:
    text, path = selector.text, selector.path
    if not path and not has_port:
        raise _invalid(text, 0, "expected a module path; the model itself is `/in` or `/out`")
    position = 0
    for component in path.split(".") if path else ():
        if not component:
            raise _invalid(text, position, "expected a name between the dots")
        if "**" in component and component != "**":
            raise _invalid(text, position + component.index("**"), "`**` must be a whole component")
        position += len(component) + 1
    for position, character in enumerate(path):
        if character.isspace():
            raise _invalid(text, position, "a module path has no spaces")


def _path_regex(path: str) -> str:
    regex = ""
    components = path.split(".")
    for index, component in enumerate(components):
        is_last = index == len(components) - 1
        if component == "**":
            regex += r".+" if is_last else r"(?:[^.]+\.)*"
            continue
        regex += "".join(
            r"[^.]*" if part == "*" else re.escape(part) for part in re.split(r"(\*)", component)
        )
        regex += "" if is_last else r"\."
    return regex


def _pick_key(text: str, match: re.Match[str]) -> int | str:
    if match.group(1) is not None:
        return int(match.group(1))
    try:
        return str(json.loads(match.group(2)))
    except ValueError:
        raise _invalid(text, match.start(), "expected a key in JSON's quotes") from None


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
