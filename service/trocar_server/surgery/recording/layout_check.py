"""Check of layouts by a second pass with other sizes of the inputs.

A dimension that moved with one axis of the inputs is that axis, as where a constant was made in its length.
One that should have moved and did not, or the other way round, is unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from trocar_server.surgery.axes.layout import BATCH, CHANNELS, HEADS, UNKNOWN, Layout, Layouts, Meaning, Piece
from trocar_server.surgery.recording.layout_walk import Walk

Sizes = Mapping[str, tuple[int, int]]
"""The sizes of axes of the inputs by name, in the first and in the second pass."""


def checked(first: Walk, second: Walk, sizes: Sizes) -> Layouts:
    """Return the layouts of a pass, checked by another one."""
    by_value = {}
    for key, layout in first.layouts.by_value.items():
        shapes = first.shapes[key], second.shapes.get(key, ())
        by_value[key] = _checked(layout, *shapes, sizes) if len(shapes[0]) == len(shapes[1]) else layout
    return replace(first.layouts, by_value=by_value)


def _checked(layout: Layout, before: tuple[int, ...], after: tuple[int, ...], sizes: Sizes) -> Layout:
    meanings = layout.meanings
    pairs = zip(meanings, before, after, strict=True)
    moved = tuple(_meaning(meaning, pair, sizes) for meaning, *pair in pairs)
    return layout if moved == meanings else replace(layout, meanings=moved)


def _meaning(meaning: Meaning, pair: list[int], sizes: Sizes) -> Meaning:
    is_moved, name = pair[0] != pair[1], meaning.name
    if not name and not is_moved and pair in map(list, sizes.values()):
        return Meaning(UNKNOWN)  # as long as an axis that did not move
    if not name and is_moved:
        axes = [axis for axis, known in sizes.items() if list(known) == pair]
        if len(axes) != 1:
            return Meaning(UNKNOWN)
        return Meaning(axes[0], () if axes[0] == BATCH else (Piece(axes[0]),))
    if name in (CHANNELS, HEADS):
        return Meaning(UNKNOWN) if is_moved else meaning
    is_plain = name == BATCH or meaning.pieces == (Piece(name),)
    if is_plain and name in sizes and list(sizes[name]) != pair:
        return Meaning(UNKNOWN)
    return meaning
