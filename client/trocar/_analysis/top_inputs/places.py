"""Places of values in their input: the cell of a grid over the picture, or the token of a text."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trocar._base.dimensions import samples_dim

if TYPE_CHECKING:
    from trocar._base.dimensions import TokenGrid
    from trocar._result.feature_maps import FeatureMapInfo
    from trocar._result.processed import ProcessedInput, ProcessedSample

_CONTEXT = 5
"""Tokens before and after a token that are kept with it."""


@dataclass(frozen=True)
class GridCell:
    """One cell of a grid over the picture that the model sees."""

    row: int
    column: int
    rows: int
    columns: int

    def box(self, widen: float = 1.0) -> tuple[float, float, float, float]:
        """Return the cell's share of the picture: left, right, top, bottom, 0 to 1.

        Args:
            widen: Factor of width and height around the cell's middle; cut at the picture's edge.
        """
        left, right = _share(self.column, self.columns, widen)
        top, bottom = _share(self.row, self.rows, widen)
        return left, right, top, bottom


@dataclass(frozen=True)
class Place:
    """A position of a feature map, in the terms of the input."""

    position: tuple[int, ...]
    """In the dimensions of the value besides samples and channels."""
    axes: tuple[str, ...]
    """What these dimensions mean, for example ("height", "width")."""
    cell: GridCell | None = None
    """In the picture; None without one, as of a class token."""
    token: str = ""
    """The token of the text, as the vocabulary spells it."""
    token_index: int | None = None
    """Its number in its text, from 0, padding not counted."""
    before: tuple[str, ...] = ()
    """The tokens before it, a few."""
    after: tuple[str, ...] = ()
    """The tokens after it, a few."""

    def __str__(self) -> str:
        if self.token_index is not None:
            return f"token {self.token_index} {self.token!r}"
        if self.cell is not None:
            return f"row {self.cell.row}, column {self.cell.column} of {self.cell.rows} x {self.cell.columns}"
        named = zip(self.axes, self.position, strict=True)
        return ", ".join(f"{name or 'position'} {place}" for name, place in named)


class ValueFrame:
    """Dimensions of the positions of one batch's values.

    Args:
        info: What the reply says of the value as the model computed it.
        processed: The texts of the batch, if its inputs were texts.
    """

    def __init__(self, info: FeatureMapInfo, processed: ProcessedInput | None) -> None:
        self._processed = processed
        self._axes = info.axes or ("?",) * len(info.shape)
        samples = samples_dim(info.axes)
        rest = [dim for dim in range(len(info.shape)) if dim not in (samples, info.channel_dim)]
        self.is_known = len(rest) == len(info.shape) - 2 and "?" not in self._axes
        self._dims = rest if self.is_known else []
        self._sizes = tuple(info.shape[dim] for dim in self._dims)
        self._grids = {grid.dimension: grid for grid in info.token_grids}

    def place(self, number: int, sample: int) -> Place | None:
        """Return a position by its number; None where the dimensions of the value are not known.

        Args:
            number: As of `trocar.peak()`: counted through the dimensions, the last one fastest.
            sample: Which sample of the batch.
        """
        if not self.is_known or not self._dims:
            return None
        position = tuple(int(place) for place in np.unravel_index(number, self._sizes))
        names = tuple(self._axes[dim] for dim in self._dims)
        by_name = dict(zip(names, zip(position, self._sizes, strict=True), strict=True))
        if self._processed is not None and "tokens" in by_name:
            place, size = by_name["tokens"]
            if size == self._processed.padded_length:
                return self._of_token(position, names, place, sample)
        return Place(position, names, self._cell(position, by_name))

    def _cell(self, position: tuple[int, ...], by_name: dict[str, tuple[int, int]]) -> GridCell | None:
        if {"height", "width"} <= by_name.keys():
            (row, rows), (column, columns) = by_name["height"], by_name["width"]
            return GridCell(row, column, rows, columns)
        for dim, place in zip(self._dims, position, strict=True):
            grid = self._grids.get(dim)
            if grid is not None and len(grid.sizes) == 2:
                return _patch(grid, place)
        return None

    def _of_token(self, position: tuple[int, ...], names: tuple[str, ...], place: int, sample: int) -> Place:
        assert self._processed is not None
        text = self._processed.samples[sample]
        index = place - (self._processed.padded_length - text.length if self._processed.pads_left else 0)
        before, token, after = _around(text, index)
        return Place(position, names, None, token, index, before, after)


def _patch(grid: TokenGrid, token: int) -> GridCell | None:
    """Return the cell of a patch token; None of a class or register token."""
    number, (rows, columns) = token - grid.first, grid.sizes
    if not 0 <= number < math.prod(grid.sizes):
        return None
    return GridCell(number // columns, number % columns, rows, columns)


def _around(text: ProcessedSample, index: int) -> tuple[tuple[str, ...], str, tuple[str, ...]]:
    if not 0 <= index < len(text.tokens):
        return (), "", ()
    before = text.tokens[max(0, index - _CONTEXT) : index]
    return before, text.tokens[index], text.tokens[index + 1 : index + 1 + _CONTEXT]


def _share(place: int, count: int, widen: float) -> tuple[float, float]:
    middle, half = (place + 0.5) / count, widen / (2 * count)
    return max(0.0, middle - half), min(1.0, middle + half)
