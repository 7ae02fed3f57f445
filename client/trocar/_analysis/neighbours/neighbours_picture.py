"""Picture of neighbours; needs matplotlib."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trocar._analysis.neighbours.neighbours import MOST_QUERIES_SHOWN
from trocar._analysis.sample_inputs import draw_sample
from trocar._base.figures import Figure
from trocar._base.names import shortened

if TYPE_CHECKING:
    from trocar._analysis.neighbours.neighbours import Neighbours

_MOST_COLUMNS = 24
_TITLE = 20
"""Characters of a panel's title."""


def draw_neighbours(
    near: Neighbours, images: str | os.PathLike[str] | Mapping[str, Any] | None = None
) -> Figure:
    """Draw a row for each query; see `Neighbours.plot`."""
    rows = min(len(near), MOST_QUERIES_SHOWN)
    columns = 1 + min(near.indices.shape[1], _MOST_COLUMNS - 1)
    figure = Figure(figsize=(1.7 * columns + 0.4, 2.0 * rows + 0.8), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False)
    sources = near.sources
    for row in range(rows):
        name = near.queries[row]
        query = sources.queries[row] if row < len(sources.queries) else _image_of(images, name)
        draw_sample(panels[row, 0], query, sources.preprocessing, name)
        panels[row, 0].set_title(_plain(f"query\n{_end(name)}"), fontsize=7)
        for panel, one in zip(panels[row, 1:], near[row], strict=False):
            value = sources.samples.get(one.index, _image_of(images, one.key))
            draw_sample(panel, value, sources.preprocessing, one.key)
            panel.set_title(_plain(f"{one.distance:.4g}\n{_end(one.key)}"), fontsize=7)
    title = near.title if rows == len(near) else f"{near.title}\nthe first {rows} of {len(near):,} queries"
    figure.suptitle(_plain(title), fontsize=9)
    return figure


def _image_of(images: str | os.PathLike[str] | Mapping[str, Any] | None, key: str) -> Any:
    """Return the image of a key; None where nothing is known of it."""
    if isinstance(images, Mapping):
        return images.get(key)
    path = None if images is None else Path(images) / key
    return path if path is not None and path.is_file() else None


def _end(name: str) -> str:
    return shortened(os.path.basename(name) or name, _TITLE)  # noqa: PTH119 - may be a text


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # no mathematics
