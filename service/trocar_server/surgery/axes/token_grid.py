"""Token grid: which positions of a dimension are the patches of a picture, row by row.

    token_grids(layout, (2, 141, 768), {"height": 224, "width": 160})     # (TokenGrid(1, (14, 10), 1),)

The layout says of which axes a dimension consists and how these were made; lengths follow from the sizes of a
call's own inputs. Class and register tokens are other parts of the same dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from trocar_server.surgery.axes.layout import Layout, Piece, after_steps


@dataclass(frozen=True)
class TokenGrid:
    """The patches along one dimension of a value.

    Attributes:
        dim: The dimension.
        sizes: Rows and columns; of videos frames before them.
        first: How many other tokens come before the patches.
        last: How many come behind them.
    """

    dim: int
    sizes: tuple[int, ...]
    first: int = 0
    last: int = 0


def token_grids(
    layout: Layout | None, shape: Sequence[int], sizes: Mapping[str, int]
) -> tuple[TokenGrid, ...]:
    """Return the grids of a value, by dimension.

    Args:
        layout: What its dimensions mean; None where that is not known.
        shape: Its shape.
        sizes: The length of each axis of the inputs in this call, by its name.
    """
    pieces = [] if layout is None else [meaning.pieces for meaning in layout.meanings]
    result = (
        _grid(dim, own, size, sizes) for dim, (own, size) in enumerate(zip(pieces, shape, strict=False))
    )
    return tuple(grid for grid in result if grid is not None)


def _grid(dim: int, pieces: Sequence[Piece], size: int, sizes: Mapping[str, int]) -> TokenGrid | None:
    grids = [place for place, piece in enumerate(pieces) if piece.axes]
    if len(grids) != 1:
        return None
    (place,) = grids
    lengths = [_length(axis, sizes) for axis in pieces[place].axes]
    others = (pieces[:place], pieces[place + 1 :])
    if not all(piece.size for piece in (*others[0], *others[1])):  # of a length that other inputs decide
        return None
    first, last = (sum(piece.size for piece in part) for part in others)
    is_whole = first + math.prod(lengths) + last == size
    return TokenGrid(dim, tuple(lengths), first, last) if is_whole else None


def _length(axis: Piece, sizes: Mapping[str, int]) -> int:
    """Return how many positions an axis has; 0 where that is not known."""
    if axis.root not in sizes:
        return 0
    own = after_steps(axis, torch.ones(1, sizes[axis.root], dtype=torch.bool))
    return 0 if own is None else own.shape[1]
