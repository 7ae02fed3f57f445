"""Ports of a call: its inputs by the parameters of the module's `forward`, however they were passed.

ports = CallPorts(parameters_of(attention), args, kwargs)
ports["in"][0]                    # the value of the first parameter
ports["in(key_value_states)"]     # that of another one
args, kwargs = ports.arguments()  # passed as before
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn

from trocar_server import forward_signature
from trocar_server.surgery.structure import Picks

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword inputs of a call."""

Place: TypeAlias = tuple[str, Picks]
"""A port, and the path to one parameter's value within that of the port."""

_Parameter = inspect.Parameter
_POSITIONAL = (_Parameter.POSITIONAL_ONLY, _Parameter.POSITIONAL_OR_KEYWORD)


# Note: [Names of inputs]
# A caller may pass `attention(x, mask)`, `attention(x, mask=mask)` or `attention(hidden_states=x, ...)`, and
# transformers does all three: only the signature of `forward` says which value is which. `in` is the mapping
# of inputs without a name of their own, by position: 0 is the value of the first parameter, and values of
# `*args` keep their positions. Every other parameter is `in(name)`. A forward whose signature cannot be read
# has positions and keywords as the caller passes them, as functions of torch have, most of them in C++.
@dataclass(frozen=True)
class Parameters:
    """The parameters of a function.

    Attributes:
        names: Their names in order; empty for one that has only a position. Keyword-only ones behind `*args`,
            whose positions count on, are not among them.
    """

    names: tuple[str, ...] = ()

    def place_of(self, name: str) -> Place:
        """Return where the value of the parameter of this name is."""
        return ("in", (0,)) if self.names[:1] == (name,) else (f"in({name})", ())

    def place_at(self, position: int) -> Place:
        """Return where the value of the parameter at this position is."""
        name = self.names[position] if position < len(self.names) else ""
        return self.place_of(name) if name else ("in", (position,))

    def name_of(self, place: Place) -> str:
        """Return the keyword of the value at a place, the inverse of `place_of`."""
        port, picks = place
        return self.names[0] if picks else port[3:-1]


UNNAMED = Parameters()
"""Those of a function without a signature."""


class CallPorts(dict[str, Any]):
    """The inputs of one call by port, in the order of the parameters. See Note: [Names of inputs].

    A port's value may be replaced.

    Args:
        parameters: Those of the called function.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """

    def __init__(self, parameters: Parameters, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__()
        self._by_position = [parameters.place_at(position) for position in range(len(args))]
        self._by_name = {name: parameters.place_of(name) for name in kwargs}
        given = dict(zip(self._by_position, args, strict=True))
        given |= {place: kwargs[name] for name, place in self._by_name.items()}
        in_order = map(parameters.place_at, range(len(parameters.names)))
        for place in dict.fromkeys((*in_order, *given)):
            if place in given:
                self._set(place, given[place])

    @property
    def positional(self) -> int:
        """How many of them are passed by position."""
        return len(self._by_position)

    def arguments(self) -> Arguments:
        """Return the arguments of the call, each passed as it was."""
        args = tuple(self._at(place) for place in self._by_position)
        return args, {name: self._at(place) for name, place in self._by_name.items()}

    def _set(self, place: Place, value: Any) -> None:
        port, picks = place
        if picks:
            self.setdefault(port, {})[picks[0]] = value
        else:
            self[port] = value

    def _at(self, place: Place) -> Any:
        port, picks = place
        return self[port][picks[0]] if picks else self[port]


_OF_CLASSES: dict[type[nn.Module], Parameters] = {}


def parameters_of(module: nn.Module) -> Parameters:
    """Return the parameters of a module's `forward`; cached for each class."""
    own = type(module)
    result = _OF_CLASSES.get(own)
    if result is not None and "forward" not in vars(module):
        return result
    result = _of(forward_signature.parameters_of(module))
    if "forward" not in vars(module):
        _OF_CLASSES[own] = result
    return result


def named_arguments(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the arguments of a call of a module by name, as far as they have one."""
    if not args:
        return kwargs
    names = parameters_of(module).names
    return {**{name: value for name, value in zip(names, args, strict=False) if name}, **kwargs}


def _of(parameters: Sequence[inspect.Parameter] | None) -> Parameters:
    if parameters is None:
        return UNNAMED
    kinds = {parameter.kind for parameter in parameters}
    wanted = _POSITIONAL if _Parameter.VAR_POSITIONAL in kinds else (*_POSITIONAL, _Parameter.KEYWORD_ONLY)
    # `**kwargs` may have a keyword of the same name as a parameter that takes no keyword.
    unnamed = {_Parameter.POSITIONAL_ONLY} if _Parameter.VAR_KEYWORD in kinds else set()
    return Parameters(tuple("" if p.kind in unnamed else p.name for p in parameters if p.kind in wanted))
