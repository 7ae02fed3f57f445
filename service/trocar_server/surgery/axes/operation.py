"""Operation: a call of one of torch's operators, with what the dimensions of its tensors are.

The dimensions of a tensor are kept on the tensor object, which torch keeps as long as the tensor. One without
any is a parameter or a constant: the same for every input.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from trocar_server.surgery.axes.axis import Dim, Dims, Kind, made, size_of

_KEPT_AT = "_trocar_dims"


def dims_of(tensor: Tensor) -> Dims:
    """Return what the dimensions of a tensor are."""
    dims: Dims | None = getattr(tensor, _KEPT_AT, None)
    if dims is None or len(dims) != tensor.dim():
        return fixed(tensor.shape)
    return dims


def put_dims(tensor: Tensor, dims: Sequence[Dim]) -> None:
    """Set what the dimensions of a tensor are; of another number or length than these, nothing is known."""
    right = len(dims) == tensor.dim() and all(
        size_of(dim) == size for dim, size in zip(dims, tensor.shape, strict=True)
    )
    setattr(tensor, _KEPT_AT, tuple(dims) if right else unknown(tensor.shape))


def fixed(shape: Iterable[int]) -> Dims:
    """Return the dimensions of a constant."""
    return tuple(made(Kind.FIXED, size) for size in shape)


def unknown(shape: Iterable[int]) -> Dims:
    """Return dimensions of which nothing is known."""
    return tuple(made(Kind.UNKNOWN, size) for size in shape)


class Operation:
    """A call of an operator.

    Args:
        func: The operator.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        result: What it returned.

    Attributes:
        name: Its name, without overload and without the underscore of those that work in place.
        outputs: The tensors that it returned.
        inputs: The tensors among its arguments, those in lists included.
        mixed: Dimensions along which its results depend on other positions than their own.
    """

    def __init__(
        self, func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        self.func, self._args, self._kwargs = func, args, kwargs
        self.name = name_of(func)
        self.outputs = list(_tensors([result]))
        self.inputs = [*_tensors(args), *_tensors(kwargs.values())]
        self.mixed: list[Dim] = []

    def argument(self, name: str, default: Any = None) -> Any:
        """Return an argument by its name in the operator's schema; its default where it was left out."""
        if name in self._kwargs:
            return self._kwargs[name]
        places, defaults = arguments_of(self.func)
        place = places.get(name)
        if place is None:
            return default
        return self._args[place] if place < len(self._args) else defaults.get(name, default)

    def dims(self, name: str = "self") -> Dims:
        """Return the dimensions of a tensor argument; of the first one where there is no such argument."""
        tensor = self.argument(name)
        return dims_of(tensor if isinstance(tensor, Tensor) else self.inputs[0])

    def mix(self, *dims: Dim) -> None:
        """Note that a result depends on all positions of these dimensions, or on where these are."""
        self.mixed += dims

    def dim_argument(self, name: str = "dim", default: int = 0) -> int:
        """Return a dimension that is an argument, from 0."""
        rank = max(self.inputs[0].dim(), 1)
        return int(self.argument(name, default)) % rank

    def dim_list(self, name: str = "dim") -> list[int]:
        """Return dimensions that are an argument, from 0; all of them where it is left out."""
        rank = self.inputs[0].dim()
        given = self.argument(name)
        if given is None or given == []:
            return list(range(rank))
        return [dim % max(rank, 1) for dim in ([given] if isinstance(given, int) else given)]


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


@lru_cache(4096)
def name_of(func: torch._ops.OpOverload) -> str:
    """Return the name of an operator, without overload and without the underscore of one in place."""
    name = func._schema.name.partition("::")[2]
    return name if name.startswith("_") and name.endswith("_") else name.removesuffix("_") or name


@lru_cache(4096)
def arguments_of(func: torch._ops.OpOverload) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the places of an operator's arguments by name, and their defaults."""
    arguments = func._schema.arguments
    places = {argument.name: place for place, argument in enumerate(arguments)}
    return places, {argument.name: argument.default_value for argument in arguments}
