"""Positions and index expressions of callers, as the wire has them."""

from collections.abc import Iterable, Sequence
from operator import index as as_integer
from types import EllipsisType
from typing import Any, SupportsIndex, TypeAlias

import numpy as np

from trocar_api.v1 import reduction_pb2 as pb

MAX_POSITIONS = 65_536

Positions: TypeAlias = SupportsIndex | slice | Iterable[SupportsIndex]
"""One position, a slice with bounds, or several positions."""
IndexItem: TypeAlias = SupportsIndex | slice | EllipsisType
IndexExpression: TypeAlias = IndexItem | tuple[IndexItem, ...]
"""What `numpy.s_[...]` returns for integers, slices and an ellipsis."""


def wire_index(expression: IndexExpression) -> pb.IndexReduction:
    """Return an index expression as a message.

    Raises:
        TypeError: Anything but integers, slices and an ellipsis is in it.
        ValueError: A slice has a step below 1, or there are two ellipses.
    """
    items = expression if isinstance(expression, tuple) else (expression,)
    if sum(item is ... for item in items) > 1:
        raise ValueError("an index has one ellipsis at most")
    return pb.IndexReduction(items=[_index_item(item) for item in items])


def position_list(axis: str, positions: Positions) -> Sequence[int]:
    """Return the positions that a caller means.

    Raises:
        TypeError: These are no integers.
        ValueError: There are none or too many, or the slice cannot be counted.
    """
    chosen: Sequence[int]
    if isinstance(positions, slice):
        chosen = _countable(axis, positions)
    elif isinstance(positions, Iterable):
        chosen = [_integer(position) for position in positions]
    else:
        chosen = [_integer(positions)]
    if not chosen or chosen[MAX_POSITIONS:]:  # the length of a range may be more than `len` can say
        raise ValueError(f"{axis}: no positions or too many; 1 to {MAX_POSITIONS:,} can be taken")
    return chosen


def _index_item(item: object) -> pb.IndexItem:
    if item is ...:
        return pb.IndexItem(ellipsis=True)
    if isinstance(item, slice):
        if item.step is not None and _integer(item.step) < 1:
            raise ValueError(f"a slice with the step {item.step}; it must be at least 1")
        start, stop, step = (_optional_integer(bound) for bound in (item.start, item.stop, item.step))
        return pb.IndexItem(slice=pb.IndexSlice(start=start, stop=stop, step=step))
    return pb.IndexItem(position=_integer(item))


def _countable(axis: str, wanted: slice) -> range:
    """Return the positions of a slice, without the size of its dimension, which only the server knows."""
    step = 1 if wanted.step is None else _integer(wanted.step)
    start = 0 if wanted.start is None else _integer(wanted.start)
    stop = None if wanted.stop is None else _integer(wanted.stop)
    is_from_the_end = start < 0 and (stop is None or stop < 0)
    is_from_the_start = start >= 0 and stop is not None and stop >= 0
    if step < 1 or not (is_from_the_end or is_from_the_start):
        raise ValueError(
            f"{axis}={wanted}: only slices such as slice(2, 8) and slice(-8, None) can be counted here; "
            "use index= for others"
        )
    return range(start, 0 if stop is None else stop, step)


def _integer(value: Any) -> int:
    """Return the int of an integer of any library; True is a mask to NumPy, so it is none.

    Raises:
        TypeError: It is no integer.
    """
    if isinstance(value, (bool, np.bool_)):
        raise TypeError("a mask cannot be sent; take positions, as numpy.flatnonzero(mask) returns them")
    try:
        return as_integer(value)
    except TypeError:
        raise TypeError(
            f"{value!r} is no position; an index has integers, slices and ..., lists of integers go to "
            "samples=, channels= or tokens="
        ) from None


def _optional_integer(value: Any) -> int | None:
    return None if value is None else _integer(value)
