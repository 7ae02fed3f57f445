"""Combination of dimensions that an operation takes as one: of operands that are added, for example."""

from __future__ import annotations

from collections.abc import Sequence

from trocar_server.surgery.axes.axis import (
    Axis,
    Digit,
    Dim,
    Dims,
    Kind,
    is_fixed,
    joined_digits,
    made,
    regrouped,
    size_of,
)


def broadcast(operands: Sequence[Dims], shape: Sequence[int]) -> Dims:
    """Return the dimensions of a result of this shape, elementwise by NumPy's rules."""
    result: list[Dim] = []
    for place in range(1, len(shape) + 1):
        size = shape[-place]
        dims = [dims[-place] for dims in operands if len(dims) >= place and size_of(dims[-place]) == size]
        result.append(combined(dims, size))
    return tuple(reversed(result))


def combined(dims: Sequence[Dim], size: int) -> Dim:
    """Return what a dimension is that all of these are; unknown where they contradict each other."""
    if size == 1:
        return ()
    result: Dim | None = None
    for dim in dims:
        if is_fixed(dim):
            continue
        result = dim if result is None else unified(result, dim)
    if result is not None:
        return result
    return next(iter(dims), None) or made(Kind.FIXED, size)


def unified(one: Dim, other: Dim) -> Dim:
    """Return what a dimension is that two dimensions of one length are."""
    if one == other or is_fixed(other):
        return one
    if is_fixed(one):
        return other
    for short, long in ((one, other), (other, one)):
        if len(short) == 1 and len(long) > 1 and _gives_way(short[0]):
            return long
    cut = _aligned(one, other)
    if cut is None:
        return made(Kind.UNKNOWN, size_of(one))
    return joined_digits(_unified_digit(*pair) for pair in zip(*cut, strict=True))


def _gives_way(digit: Digit) -> bool:
    """Whether a digit says less than any other: positions that a weight has mixed, or nothing."""
    return digit.kind is Kind.UNKNOWN or (digit.kind is Kind.NAMED and digit.axis.is_mixed)


def _aligned(one: Dim, other: Dim) -> tuple[Dim, Dim] | None:
    """Cut two dimensions into digits of equal sizes."""
    if [digit.size for digit in one] == [digit.size for digit in other]:
        return one, other
    sizes = _common_sizes([digit.size for digit in one], [digit.size for digit in other])
    cut = [None if sizes is None else _cut(dim, sizes) for dim in (one, other)]
    return None if cut[0] is None or cut[1] is None else (cut[0], cut[1])


def _common_sizes(one: Sequence[int], other: Sequence[int]) -> list[int] | None:
    """Return sizes into which both sequences can be cut."""
    left, right, sizes = [*reversed(one)], [*reversed(other)], []
    while left and right:
        a, b = left.pop(), right.pop()
        if a % b and b % a:
            return None
        sizes.append(min(a, b))
        if a > b:
            left.append(a // b)
        elif b > a:
            right.append(b // a)
    return sizes


def _cut(dim: Dim, sizes: Sequence[int]) -> Dim | None:
    dims = regrouped([dim], sizes)
    return None if dims is None or any(len(part) != 1 for part in dims) else tuple(part[0] for part in dims)


def _unified_digit(one: Digit, other: Digit) -> Digit:
    a, b = one.axis.real, other.axis.real
    if (a is b and one.stride == other.stride) or other.kind is Kind.FIXED:
        return one
    if one.kind is Kind.FIXED:
        return other
    for digit, known in ((one, other), (other, one)):
        if digit.kind is Kind.UNKNOWN:
            if digit.is_whole and known.is_whole:
                digit.axis.become(known.axis)
            return known
    return _unified_kinds(one, other) if a.kind is b.kind else _unknown(one)


def _unified_kinds(one: Digit, other: Digit) -> Digit:
    """Return what digits of different axes of one kind are."""
    a, b = one.axis.real, other.axis.real
    if a.kind is Kind.CHANNELS:
        return one
    if a.kind is Kind.NAMED:
        return _unified_names(one, other)
    if a.kind is Kind.BATCH:
        return one if a.name == b.name and one.stride == other.stride else _unknown(one)
    return one if len(a.parts) == len(b.parts) and one.is_whole and other.is_whole else _unknown(one)


def _unified_names(one: Digit, other: Digit) -> Digit:
    a, b = one.axis, other.axis
    if a.is_mixed != b.is_mixed:
        return other if a.is_mixed else one
    if a.root.name == b.root.name:  # axes of inputs that have one name are equal within a call
        return one
    return _unknown(one)


def _unknown(digit: Digit) -> Digit:
    return Digit(Axis(Kind.UNKNOWN, digit.size), 1, digit.size)
