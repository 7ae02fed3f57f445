r"""Selector syntax tree: module, call, port, element.

    [kind:]path[:Type][@call][#order][/port][[pick]...]

`layer4`, `layer*.0.relu@1`, `encoder.**:Conv2d`, `fc/in`, `/in[0]`, `out_proj/in(query)`, `head["out"]`,
`fc/param(weight)`, `#-1`, `re:layer[34]\.\d`, `fx:layer1.0.add`, `fn:softmax@3`.

`*` matches anything within one path component, `**` any number of components (a trailing `.**`
everything inside, as in gitignore). A name with other characters is quoted as in JSON and literal:
`parts."a:b"`. The empty path is the model itself and needs a port, `/in`, `/out`; with an order index it is
every module that calls no other. `docs/selectors.md` explains the whole syntax.
"""

from dataclasses import dataclass
from functools import cached_property

from trocar_server.surgery.selectors.naming import ALL_PARAMETERS, split_port
from trocar_server.surgery.selectors.patterns import Component, matches_path, simplified
from trocar_server.surgery.selectors.regexes import matches_whole
from trocar_server.surgery.structure import Picks

ALL_CALLS = "*"

PATTERN = "pattern"
"""The port of a module's attention after the softmax, (batch, heads, queries, keys)."""
LOGITS = "logits"
"""The port of a module's attention before the softmax, scaled and masked."""
SINK = "sink"
"""The port of the share of a module's attention that goes to no key, (batch, heads, queries, 1)."""


@dataclass(frozen=True)
class Order:
    """A place in execution order, `#3`, or a half-open range of places, `#3:7`.

    Attributes:
        start: The place, or the first of the range; negative counts from the last. None: from the first.
        stop: The end of the range, itself not in it. None: to the last.
        is_range: Whether it is a range.
    """

    start: int | None = None
    stop: int | None = None
    is_range: bool = False


@dataclass(frozen=True)
class Selector:
    """A parsed selector, from `parsing.parse_selector`.

    Attributes:
        text: The source text.
        path: Module path, node or function, `*` and `**` allowed; empty for the model itself, or with an
            order for everything that runs. Of kind `regex` the regular expression.
        kind: Kind of the path: `module`, `regex`, `fx` or `fn`.
        type_name: Class name that the module must have, or None.
        call: Call index (negative counts from the last), `"*"` for all calls, or None when absent.
        order: Position among all calls in execution order, or None when absent.
        port: `out`, `in`, `in(name)` for a keyword input, `param(name)`, `pattern`, `logits`, `sink` or
            `scores`.
        is_gradient: Whether it selects the gradient with respect to that value: `grad_out` and so on.
        picks: Path into a structured value; empty for all of it.
        is_every_stage: Whether it ends in `[*]`: the stages of all blocks, `layer[0]` and so on.
        quoted: Positions of the path's literal components, `*` included.
    """

    text: str
    path: str
    kind: str = "module"
    type_name: str | None = None
    call: int | str | None = None
    order: Order | None = None
    port: str = "out"
    picks: Picks = ()
    quoted: frozenset[int] = frozenset()
    is_gradient: bool = False
    is_every_stage: bool = False

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The components of the path."""
        return tuple(self.path.split("."))

    @cached_property
    def _pattern(self) -> tuple[Component, ...]:
        return simplified([Component(name, i in self.quoted) for i, name in enumerate(self.names)])

    @cached_property
    def is_pattern(self) -> bool:
        """Whether it may match several modules."""
        if self.kind == "regex" or self.type_name is not None or self.is_everything:
            return True
        return any("*" in name for i, name in enumerate(self.names) if i not in self.quoted)

    @property
    def is_attention(self) -> bool:
        """Whether it selects the attention that modules compute."""
        return self.port in (PATTERN, LOGITS, SINK) and self.kind in ("module", "regex")

    @property
    def records(self) -> str:
        """The kind of records that it is looked up in: `module`, `fx`, `fn` or `attention`."""
        return "attention" if self.is_attention else "module" if self.kind == "regex" else self.kind

    @property
    def is_of_function(self) -> bool:
        """Whether its values belong to functions that modules call."""
        return self.kind == "fn" or self.is_attention

    @property
    def is_plural(self) -> bool:
        """Whether it may match several values; those that do not fit are left out."""
        return self.is_pattern or self.parameter == ALL_PARAMETERS

    @property
    def depends_on_calls(self) -> bool:
        """Whether its matches depend on how often modules are called; the model is called once."""
        if self.parameter is not None or self.kind == "fx" or (not self.path and self.order is None):
            return False
        return (
            self.is_pattern or self.order is not None or not (isinstance(self.call, int) and self.call >= 0)
        )

    @property
    def is_everything(self) -> bool:
        """Whether it has an order and no path: all calls of leaf modules."""
        return not self.path and self.order is not None

    @property
    def parameter(self) -> str | None:
        """The parameter or buffer that the port names, None for values of a pass."""
        word, name = split_port(self.port)
        return name if word == "param" else None

    def matches(self, path: str, type_name: str) -> bool:
        """Whether it matches a module of this path and class."""
        return self.type_name in (None, type_name) and self.matches_path(path)

    def matches_path(self, path: str) -> bool:
        """Whether it matches a module of this path, regardless of class."""
        if self.kind == "regex":
            return matches_whole(self.path, path)
        return matches_path(self._pattern, path.split("."))
