"""Nested inputs: dictionaries and lists of arrays as one argument, cut into samples and stacked again."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trocar._base.tensors import Array
from trocar._request.inputs import Flag, TensorList


def is_structure(value: object) -> bool:
    """Whether a value is a dictionary, or a list that is one argument."""
    return isinstance(value, (Mapping, TensorList))


def is_shared(value: object) -> bool:
    """Whether a value goes with every batch: a flag."""
    return isinstance(value, (Flag, bool, int))


def leaves(value: Any) -> Iterator[Any]:
    """Yield what is in a structure; the value itself if it is none."""
    if not is_structure(value):
        yield value
        return
    for item in value.values() if isinstance(value, Mapping) else value.values:
        yield from leaves(item)


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a structure with every leaf changed."""
    if isinstance(value, Mapping):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, TensorList):
        return TensorList(tuple(mapped(item, change) for item in value.values))
    return change(value)


def copied(value: Any) -> Any:
    """Return inputs with arrays of their own, for a reader that comes later than the next use of a buffer."""
    if isinstance(value, (Mapping, TensorList)):
        return mapped(value, copied)
    if isinstance(value, (list, tuple)):
        return type(value)(map(copied, value)) if type(value) in (list, tuple) else value
    if hasattr(value, "detach"):  # a torch tensor, which this package does not import
        return value.detach().clone()
    return value.copy() if isinstance(value, np.ndarray) else value


def shape_of(value: Any) -> object:
    """Return what two structures have in common whose arrays can be stacked."""
    if isinstance(value, Mapping):
        return tuple((key, shape_of(item)) for key, item in value.items())
    if isinstance(value, TensorList):
        return ("list", *map(shape_of, value.values))
    return "array"


def stacked(samples: Sequence[Any]) -> Any:
    """Return structures of one kind as one structure of batches.

    Raises:
        ValueError: Arrays at one place differ in shape.
    """
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: stacked([sample[key] for sample in samples]) for key in first}
    if isinstance(first, TensorList):
        return TensorList(tuple(map(stacked, zip(*(sample.values for sample in samples), strict=True))))
    arrays: list[Array] = list(samples)
    return np.stack(arrays)
