"""Signature of a module's forward: the name of each argument, however a caller passes it.

    signature = signature_of(bert)
    signature.bind(["", ""])                             # ("input_ids", "attention_mask")
    signature.called(["input_ids", "attention_mask"], [ids, mask])
    # ([], {"input_ids": ids, "attention_mask": mask})

# Note: [Names of arguments]
Requests, batches and data sets name the arguments of a forward or give them by position. `bind` gives each
its parameter's name, where a plan or a batch is made; everything behind that has one form. `called` decides,
where the module is called, how each is passed: by name, which skips optional parameters and is how libraries
call their models; by position what has no other way (positional-only parameters, values of `*args` and what
precedes them), and all arguments of a module that has hooks of its own which see positions alone. An exported
program takes each argument as it was exported. Without a signature that can be read, for example of a traced
module, an argument without a name stays without one and is passed by position.
"""

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.nested_names import is_nested, nested, parse_name

Value = TypeVar("Value")

_Parameter = inspect.Parameter
_BY_POSITION = (_Parameter.POSITIONAL_ONLY, _Parameter.POSITIONAL_OR_KEYWORD)
_BY_NAME = (_Parameter.POSITIONAL_OR_KEYWORD, _Parameter.KEYWORD_ONLY)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_OF_GRADIENTS = ("_backward_hooks", "_backward_pre_hooks")


class HasForward(Protocol):
    """A module."""

    @property
    def forward(self) -> Callable[..., Any]:
        """Its pass."""
        ...


def parameters_of(module: HasForward) -> tuple[inspect.Parameter, ...] | None:
    """Return the parameters of a module's forward; None where they cannot be read, for example in C++.

    Of a decorated forward those of the decorator, unless it passes on any arguments. Of an exported program
    each as it was exported, by position or by name.
    """
    compiled = getattr(module, "_orig_mod", None)  # of torch.compile, whose own forward takes anything
    if compiled is not None and callable(getattr(compiled, "forward", None)):
        return parameters_of(compiled)
    inner = _read(module.forward, follow_wrapped=True)
    if inner is None:
        return None
    outer = _read(module.forward, follow_wrapped=False) or inner  # a scripted forward wraps what was scripted
    known = {parameter.name for parameter in inner}
    passes_on = any(parameter.kind is _Parameter.VAR_KEYWORD for parameter in outer) and all(
        parameter.name in known for parameter in outer if parameter.kind in (*_BY_POSITION, *_BY_NAME)
    )
    return _as_exported(module, inner if passes_on else outer)


def _read(function: Callable[..., Any], *, follow_wrapped: bool) -> tuple[inspect.Parameter, ...] | None:
    try:
        signature = inspect.signature(function, follow_wrapped=follow_wrapped)
    except (TypeError, ValueError):
        return None
    return tuple(signature.parameters.values())


def _as_exported(
    module: HasForward, parameters: tuple[inspect.Parameter, ...]
) -> tuple[inspect.Parameter, ...]:
    spec = getattr(module, "_in_spec", None)
    if spec is None:
        return parameters
    positions = len(spec.unflatten(range(spec.num_leaves))[0])
    return tuple(
        parameter.replace(kind=_Parameter.POSITIONAL_ONLY if index < positions else _Parameter.KEYWORD_ONLY)
        for index, parameter in enumerate(parameters)
    )


def _sees_positions_alone(module: HasForward) -> bool:
    """Whether a module has hooks of its own that do not get arguments passed by name."""
    if any(getattr(module, hooks, None) for hooks in _OF_GRADIENTS):
        return True
    return any(
        set(getattr(module, hooks, None) or ()) - set(getattr(module, f"{hooks}_with_kwargs", None) or ())
        for hooks in _HOOKS
    )


def signature_of(module: HasForward) -> "ForwardSignature":
    """Return the signature of a module's forward."""
    return ForwardSignature(parameters_of(module), _sees_positions_alone(module))


@dataclass(frozen=True)
class ForwardSignature:
    """How the arguments of a forward are named and passed. See Note: [Names of arguments].

    Attributes:
        parameters: Its parameters in order; None where they cannot be read.
        prefers_positions: Whether what can be passed by position is.
    """

    parameters: tuple[inspect.Parameter, ...] | None
    prefers_positions: bool = False

    def bind(self, names: Sequence[str], unchecked: Collection[str] = ()) -> tuple[str, ...]:
        """Return the name of each argument: its parameter's; empty for values of `*args`.

        Args:
            names: As the caller gives them, empty for an argument by position. Inputs within the first
                argument without a name begin with `[`.
            unchecked: Names that another check refuses where they are no parameters.

        Raises:
            ServiceError: `INPUT_REJECTED`: one too many, an unknown name, or an argument given twice.
        """
        if self.parameters is None:
            return tuple(names)
        bound = tuple(self._bound(names))
        if not self._takes_any_name:
            self._check_known([name for name in bound if name not in unchecked])
        self._check_given(names, bound)
        return bound

    def adopted(
        self, args: Sequence[Value], kwargs: Mapping[str, Value]
    ) -> tuple[Sequence[Value], Mapping[str, Value]]:
        """Return the arguments of a call of another forward for this one.

        By their names, where it has these; otherwise in their order, under its own names.

        Raises:
            ServiceError: `INPUT_REJECTED`, it has fewer.
        """
        if self.parameters is None or self._takes_any_name or self._known.issuperset(kwargs):
            return args, kwargs
        values = [*args, *kwargs.values()]
        return self.called(self.bind(("",) * len(values)), values)

    def takes_as_keywords(self, names: Sequence[str]) -> bool:
        """Whether `called` passes each argument by its name, as it is."""
        return self.called(names, names) == ([], dict(zip(names, names, strict=True)))

    def called(self, names: Sequence[str], values: Sequence[Value]) -> tuple[list[Value], dict[str, Value]]:
        """Return the positional and the keyword arguments of a call of the module.

        Args:
            names: The bound name of each value.
            values: The arguments; inputs within one become its dictionaries and lists.
        """
        if any(map(is_nested, names)):
            names, values = nested(names, values)  # type: ignore[assignment]
        rest = [value for name, value in zip(names, values, strict=True) if not name]
        keywords = {name: value for name, value in zip(names, values, strict=True) if name}
        positions = self._positions if rest or self.prefers_positions else self._positions_only
        taken: list[Value] = []
        for name in positions:
            if name not in keywords:
                break
            taken.append(keywords.pop(name))
        return [*taken, *rest], keywords

    @cached_property
    def _positions(self) -> tuple[str, ...]:
        """The names of the parameters that have a position."""
        return tuple(p.name for p in self.parameters or () if p.kind in _BY_POSITION)

    @cached_property
    def _positions_only(self) -> tuple[str, ...]:
        """Which of them take no name."""
        return tuple(p.name for p in self.parameters or () if p.kind is _Parameter.POSITIONAL_ONLY)

    @cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(p.name for p in self.parameters or () if p.kind in (*_BY_POSITION, *_BY_NAME))

    def _takes(self, kind: Any) -> bool:
        return any(parameter.kind is kind for parameter in self.parameters or ())

    @cached_property
    def _takes_any_name(self) -> bool:
        return self._takes(_Parameter.VAR_KEYWORD)

    def _bound(self, names: Sequence[str]) -> Iterator[str]:
        left, within = iter(self._positions), ""
        has_more = self._takes(_Parameter.VAR_POSITIONAL)

        def following() -> str:
            name = next(left, None)
            if name is None and not has_more:
                raise self._too_many(names)
            return name or ""

        for name in names:
            if not name:
                yield following()
            elif name.startswith("["):
                within = within or following()
                yield within + name
            else:
                yield name

    def _too_many(self, names: Sequence[str]) -> ServiceError:
        count = sum(not name for name in names) + any(name.startswith("[") for name in names)
        takes = len(self._positions)
        return _rejected(f"the model takes {takes} arguments by position, and {count} are given; {self}")

    def _check_known(self, bound: Sequence[str]) -> None:
        for name in bound:
            root = parse_name(name)[0] if is_nested(name) else name
            if root and root not in self._known:
                raise _rejected(f"the model has no argument '{root[:80]}'; {self}")

    def _check_given(self, names: Sequence[str], bound: Sequence[str]) -> None:
        """Refuse an argument given twice, and a gap among those that have a position only."""
        plain = [name for name in bound if name]
        for name in plain:
            if list(names).count(name) > 1:
                raise _rejected(f"the input '{name[:80]}' is given twice")
            if plain.count(name) > 1:
                raise _rejected(f"the argument '{name[:80]}' is given by position and by name; {self}")
        if bound != tuple(names):
            try:
                nested(bound, bound)
            except ValueError as error:
                raise _rejected(f"{error}; {self}") from None
        given = {parse_name(name)[0] if is_nested(name) else name for name in bound}
        positions = self._positions if "" in given else self._positions_only
        missing = ""
        for name in positions:
            if name in given and missing:
                raise _rejected(f"'{missing}', which comes before '{name}', is missing; {self}")
            missing = missing or ("" if name in given else name)

    def __str__(self) -> str:
        """As `it takes x, mask, *more`."""
        shown = [_shown(parameter) for parameter in self.parameters or ()]
        return f"it takes {', '.join(shown) or 'none'}"


def _shown(parameter: inspect.Parameter) -> str:
    if parameter.kind is _Parameter.VAR_POSITIONAL:
        return f"*{parameter.name}"
    return f"**{parameter.name}" if parameter.kind is _Parameter.VAR_KEYWORD else parameter.name


def _rejected(message: str) -> ServiceError:
    return ServiceError(ErrorReason.INPUT_REJECTED, message)
