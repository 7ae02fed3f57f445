"""Demo picture: each photograph beside its feature maps, deeper from left to right."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from trocar._base.tensors import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Best = Sequence[tuple[str, float]]
"""The most likely classes of one photograph, with their probabilities."""

_SIDE = 3
"""Channels along each side of a mosaic."""
_BACKGROUND, _TEXT, _QUIET, _ACCENT = "#14161b", "#eceff4", "#8f98a8", "#f2a65a"


def draw(images: Sequence[Path], maps: Mapping[str, Array], best: Sequence[Best]) -> "Figure":
    """Draw a row for each photograph: the photograph, a mosaic for each feature map, the classes.

    Args:
        images: Files that matplotlib reads.
        maps: Feature maps of shape (batch, channels, height, width), from shallow to deep.
        best: The most likely classes of each photograph.
    """
    from matplotlib.figure import Figure
    from matplotlib.image import imread

    deepest = list(maps)[-1]
    figure = Figure(figsize=(2.0 * len(maps) + 6.1, 2.32 * len(images) + 0.2), dpi=110, layout="constrained")
    figure.set_facecolor(_BACKGROUND)
    columns = len(maps) + 3
    grid = figure.subplots(len(images), columns, squeeze=False, width_ratios=[*[1.0] * (columns - 1), 1.15])
    for row, image in enumerate(images):
        photograph = _square(imread(image))
        _draw_image(grid[row, 0], photograph, image.stem)
        for axes, (name, values) in zip(grid[row, 1:-2], maps.items(), strict=True):
            _, channels, height, width = values.shape
            title = f"{name}\n{channels} channels of {height} x {width}" if row == 0 else ""
            _draw_image(axes, _mosaic(values[row]), title)
        title = f"{deepest}\nmean of its channels" if row == 0 else ""
        _draw_overlay(grid[row, -2], photograph, maps[deepest][row].mean(axis=0), title)
        _draw_classes(grid[row, -1], best[row])
    return figure


def _draw_image(axes: "Axes", image: Array, title: str) -> None:
    axes.imshow(image, cmap="magma", interpolation="nearest", vmin=0, vmax=1)
    axes.set_axis_off()
    axes.set_title(title, color=_TEXT, fontsize=8.5, linespacing=1.5)


def _draw_overlay(axes: "Axes", photograph: Array, response: Array, title: str) -> None:
    """Overlay the strength of a feature map on the photograph in grey."""
    side = photograph.shape[0]
    grey = photograph[..., :3].mean(axis=2, keepdims=True).repeat(3, axis=2)
    _draw_image(axes, 0.75 * grey, title)
    heat = _scaled(response)
    extent = (-0.5, side - 0.5, side - 0.5, -0.5)
    axes.imshow(heat, cmap="magma", interpolation="bicubic", alpha=0.72, vmin=0, vmax=1, extent=extent)


def _draw_classes(axes: "Axes", best: Best) -> None:
    axes.set_facecolor(_BACKGROUND)
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    axes.set_ylim(len(best) - 0.3, -0.7)
    for position, (name, probability) in enumerate(best):
        colour = _ACCENT if position == 0 else _QUIET
        axes.barh(position + 0.12, probability, height=0.22, color=colour)
        axes.text(0, position - 0.1, name, color=_TEXT, fontsize=8.5, va="bottom")
        axes.text(
            1, position - 0.1, _percent(probability), color=colour, fontsize=8.5, va="bottom", ha="right"
        )


def _percent(probability: float) -> str:
    return f"{probability:.0%}" if probability >= 0.005 else "< 1%"


def _square(pixels: Array) -> Array:
    """Crop the centre, which the model sees."""
    height, width = pixels.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return pixels[top : top + side, left : left + side]


def _mosaic(channels: Array) -> Array:
    """Lay the channels that vary most out in a square, each on its own scale from 0 to 1."""
    chosen = np.argsort(channels.std(axis=(1, 2)))[::-1][: _SIDE * _SIDE]
    tiles = [_padded(_scaled(channels[index])) for index in chosen]
    rows = [np.hstack(tiles[start : start + _SIDE]) for start in range(0, len(tiles), _SIDE)]
    return np.vstack(rows)


def _scaled(tile: Array) -> Array:
    low, high = np.percentile(tile, (1, 99))
    scaled: Array = np.clip((tile - low) / max(high - low, 1e-12), 0, 1)
    return scaled


def _padded(tile: Array) -> Array:
    """Enlarge a tile to one size for all depths and leave a gap around it, which is not drawn."""
    factor = max(1, 112 // tile.shape[0])
    large = np.kron(tile, np.ones((factor, factor)))
    return np.pad(large, 4, constant_values=np.nan)
