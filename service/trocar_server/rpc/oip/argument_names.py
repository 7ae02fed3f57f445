"""Input names of a model: the names of its forward's arguments."""

import inspect
from collections.abc import Sequence
from itertools import count

from trocar_server.forward_signature import HasForward, parameters_of
from trocar_server.rpc.codec.fields import MAX_TEXT_CHARACTERS, invalid

_Parameter = inspect.Parameter
_POSITIONAL = (_Parameter.POSITIONAL_ONLY, _Parameter.POSITIONAL_OR_KEYWORD)


def input_names(module: HasForward, wanted: int) -> list[str]:
    """Return the names of the first arguments, for example `["x"]`; of `*xs` `xs__0`, `xs__1`, ..."""
    names: list[str] = []
    for parameter in _parameters(module):
        if parameter.kind in _POSITIONAL:
            names.append(parameter.name)
        elif parameter.kind is _Parameter.VAR_POSITIONAL:
            names += [f"{parameter.name}__{index}" for index in range(wanted - len(names))]
    return names[:wanted]


def arranged(model_id: str, module: HasForward, names: Sequence[str]) -> list[tuple[int, str]]:
    """Assign inputs to the arguments of a forward.

    Args:
        model_id: For errors.
        module: The module whose forward takes them.
        names: The input names of a request, in its order.

    Returns:
        In the order of the parameters, the index of each input and its name; empty for values of `*args`.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, with the field named.
    """
    left = _indices(names)
    result: list[tuple[int, str]] = []
    keywords: list[tuple[int, str]] = []
    parameters = _parameters(module)
    for parameter in parameters:
        if parameter.kind is _Parameter.VAR_POSITIONAL:
            numbered = (f"{parameter.name}__{index}" for index in count())
            while (name := next(numbered)) in left:
                result.append((left.pop(name), ""))
        elif parameter.kind is _Parameter.VAR_KEYWORD:
            keywords += [(left.pop(name), name) for name in list(left) if name]
        elif parameter.name in left:
            given = result if parameter.kind in _POSITIONAL else keywords
            given.append((left.pop(parameter.name), parameter.name))
    for name, index in left.items():
        takes = ", ".join(_shown(parameter) for parameter in parameters)
        raise invalid(
            f"inputs[{index}].name", f"model '{model_id}' has no input '{name[:80]}'; it takes {takes}"
        )
    return [*result, *keywords]


def _indices(names: Sequence[str]) -> dict[str, int]:
    indices: dict[str, int] = {}
    for index, name in enumerate(names):
        if len(name) > MAX_TEXT_CHARACTERS:
            raise invalid(f"inputs[{index}].name", f"over {MAX_TEXT_CHARACTERS} characters")
        if name in indices:
            raise invalid(f"inputs[{index}].name", f"'{name[:80]}' is given twice")
        indices[name] = index
    return indices


def _parameters(module: HasForward) -> list[inspect.Parameter]:
    result = parameters_of(module)
    return [_Parameter("input", _Parameter.VAR_POSITIONAL)] if result is None else list(result)


def _shown(parameter: inspect.Parameter) -> str:
    if parameter.kind is _Parameter.VAR_POSITIONAL:
        return f"{parameter.name}__0, {parameter.name}__1, ..."
    return "any name" if parameter.kind is _Parameter.VAR_KEYWORD else parameter.name
