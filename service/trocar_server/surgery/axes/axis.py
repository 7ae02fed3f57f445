"""Axis: what an index along a dimension counts, and dimensions made of digits of axes.

    tokens = Axis(Kind.NAMED, 9, "tokens")
    whole(tokens)                        # a dimension that is this axis
    regrouped([whole(batch), whole(width)], (3, 9, 12, 64))     # dimensions after a view

# Note: [Digits]
A view splits and joins dimensions: 768 channels become 12 heads of 64 channels, batch and heads become one
dimension, and later all of it is undone. So a dimension is a sequence of digits, as of a number with several
bases: digit (axis, stride, size) counts in steps of `stride` along its axis. A view only cuts the digits of
all dimensions, in order, at other places, which is exact: nothing is recognised by its length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, TypeAlias


class Kind(StrEnum):
    """What kind of axis it is."""

    BATCH = "batch"
    """Samples."""
    NAMED = "named"
    """Positions of an input: tokens, frames, height; or made of these by a convolution, for example."""
    CHANNELS = "channels"
    """Made by a weight, or the channels of an input."""
    FIXED = "fixed"
    """Of parameters and constants: the same for every input."""
    JOINED = "joined"
    """Several dimensions one after the other, as of a class token and patches."""
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Step:
    """How an axis was made from another one.

    Attributes:
        name: `window` of a convolution or pool (kernel, stride, padding, dilation), `slice` (start, stop,
            step), `pad` (before, after), `roll` (shifts), `flip`; `mixed` where positions do not correspond.
        numbers: Its numbers, as given to the operation.
    """

    name: str
    numbers: tuple[int, ...] = ()


class Axis:
    """What an index counts. Two axes are the same only if they are one object.

    Args:
        kind: Its kind.
        size: Its length in the pass.
        name: As in the model's input signature; empty for other kinds than `NAMED`.
        source: The axis that it was made from.
        step: How.
        parts: The dimensions that a joined axis consists of.
    """

    __slots__ = ("_bound", "kind", "name", "parts", "size", "source", "step")

    def __init__(
        self,
        kind: Kind,
        size: int,
        name: str = "",
        *,
        source: Axis | None = None,
        step: Step | None = None,
        parts: tuple[Dim, ...] = (),
    ) -> None:
        self.kind, self.size, self.name = kind, size, name
        self.source, self.step, self.parts = source, step, parts
        self._bound: Axis | None = None

    @property
    def real(self) -> Axis:
        """The axis that an unknown one turned out to be; itself otherwise."""
        axis = self
        while axis._bound is not None:
            axis = axis._bound
        return axis

    @property
    def root(self) -> Axis:
        """The axis of an input that it was made from, through all steps."""
        axis = self.real
        while axis.source is not None:
            axis = axis.source.real
        return axis

    @property
    def is_mixed(self) -> bool:
        """Whether positions do not correspond to its root's."""
        axis = self.real
        while axis.source is not None:
            if axis.step is not None and axis.step.name == "mixed":
                return True
            axis = axis.source.real
        return False

    def become(self, other: Axis) -> None:
        """Let an unknown axis be another one, in all values that have it."""
        if self.real is not other.real and self.real.kind is Kind.UNKNOWN:
            self.real._bound = other.real


class Digit(NamedTuple):
    """A digit of an axis. See Note: [Digits]."""

    axis: Axis
    stride: int
    size: int

    @property
    def kind(self) -> Kind:
        """The kind of its axis."""
        return self.axis.real.kind

    @property
    def is_whole(self) -> bool:
        """Whether it counts along all of its axis."""
        return self.size == self.axis.real.size


Dim: TypeAlias = tuple[Digit, ...]
"""A dimension: its digits, the most significant one first; none for a dimension of one element."""
Dims: TypeAlias = tuple[Dim, ...]
"""All dimensions of a tensor."""


def whole(axis: Axis) -> Dim:
    """Return a dimension that is an axis."""
    return () if axis.size == 1 else (Digit(axis, 1, axis.size),)


def made(kind: Kind, size: int) -> Dim:
    """Return a dimension that is a new axis."""
    return whole(Axis(kind, size))


def size_of(dim: Dim) -> int:
    """Return the length of a dimension."""
    return math.prod(digit.size for digit in dim)


def kinds_of(dim: Dim) -> set[Kind]:
    """Return the kinds of a dimension's axes."""
    return {digit.kind for digit in dim}


def is_fixed(dim: Dim) -> bool:
    """Whether a dimension is the same for every input."""
    return all(digit.kind is Kind.FIXED for digit in dim)


def joined_digits(digits: Iterable[Digit]) -> Dim:
    """Return a dimension of these digits; neighbours of one axis become one digit where they can."""
    dim: list[Digit] = []
    for digit in digits:
        if digit.size == 1:
            continue
        before = dim[-1] if dim else None
        if before is None:
            dim.append(digit)
        elif before.axis.real is digit.axis.real and before.stride == digit.stride * digit.size:
            dim[-1] = Digit(digit.axis, digit.stride, before.size * digit.size)
        elif before.kind is digit.kind and digit.kind in (Kind.FIXED, Kind.CHANNELS):
            dim[-1] = made(digit.kind, before.size * digit.size)[0]
        else:
            dim.append(digit)
    return tuple(dim)


def regrouped(dims: Sequence[Dim], sizes: Sequence[int]) -> Dims | None:
    """Return the dimensions of a view of these sizes; None where no digit ends where a dimension does."""
    rest = [digit for dim in reversed(dims) for digit in reversed(dim)]
    result: list[Dim] = []
    for size in sizes:
        taken = _take(rest, size)
        if taken is None:
            return None
        result.append(joined_digits(taken))
    return tuple(result)


def _take(rest: list[Digit], size: int) -> list[Digit] | None:
    """Take digits of a product from the end of a list; the last one is cut where it has to be."""
    taken: list[Digit] = []
    while size > 1:
        if not rest:
            return None
        axis, stride, count = rest.pop()
        if size % count == 0:
            taken.append(Digit(axis, stride, count))
            size //= count
        elif count % size == 0:
            inner = count // size
            taken.append(Digit(axis, stride * inner, size))
            rest.append(Digit(axis, stride, inner))
            size = 1
        else:
            return None
    return taken
