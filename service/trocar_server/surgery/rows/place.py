"""Place of the rows of a batch within a tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class MixedRowsError(Exception):
    """Rows may depend on each other, or on how many there are."""


class Size(NamedTuple):
    """The length of a dimension: a number, or that many times the number of rows."""

    length: int
    is_of_rows: bool = False


@dataclass(frozen=True)
class Rows:
    """Where rows are: at index `(outer * row_count + row) * after + inner` of one dimension.

    Attributes:
        dim: The dimension, from 0.
        before: The number of `outer` positions, as of a tensor that is repeated.
        after: The number of `inner` positions, as of heads that are folded into the batch.
        is_number: Whether every element is the number of its row, which nothing but a lookup may use.
    """

    dim: int
    before: int = 1
    after: int = 1
    is_number: bool = False

    @property
    def is_first(self) -> bool:
        """Whether the first dimension is the rows, and the values may be given away."""
        return self == Rows(0)


def size_of(size: Any, symbol: Any) -> Size:
    """Return a size of a traced tensor.

    Args:
        size: A number, or torch's symbolic one.
        symbol: The symbol of the number of rows.

    Raises:
        MixedRowsError: It is no multiple of the number of rows.
    """
    if isinstance(size, int):
        return Size(size)
    count = size.node.expr / symbol
    if not count.is_Integer:
        raise MixedRowsError(f"a dimension has the length {size}")
    return Size(int(count), is_of_rows=True)


def sizes_of(value: Any, symbol: Any) -> list[Size]:
    """Return the sizes of a traced tensor.

    Raises:
        MixedRowsError: As `size_of`.
    """
    return [size_of(size, symbol) for size in value.shape]


def count_of(sizes: Sequence[Size]) -> int:
    """Return the number of elements of dimensions, for each row where one of them has the rows."""
    return math.prod(size.length for size in sizes)


def dim_of_rows(sizes: Sequence[Size]) -> int | None:
    """Return the dimension that grows with the number of rows; None without one.

    Raises:
        MixedRowsError: There are several.
    """
    dims = [dim for dim, size in enumerate(sizes) if size.is_of_rows]
    if len(dims) > 1:
        raise MixedRowsError("two dimensions grow with the number of rows")
    return dims[0] if dims else None
