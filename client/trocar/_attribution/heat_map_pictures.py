"""Heat maps over images; needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trocar._attribution.image_pixels import crop_box, image_pixels, input_pixels
from trocar._base.figures import Figure
from trocar._base.tensors import Array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

    from trocar._attribution.attribution import Attribution

_COLOURS = "inferno"


@dataclass(frozen=True)
class Panel:
    """One heat map over one image."""

    pixels: Array
    """The image, (height, width, 3) or (height, width), 0 to 1."""
    heat: Array
    """From 0 to 1."""
    box: tuple[float, float, float, float]
    """Where the heat map lies in the image: left, right, bottom, top, in pixels."""
    title: str
    """The class and its score."""


def panel(attribution: Attribution, sample: int, image: object = None, title: str = "") -> Panel:
    """Prepare one sample for drawing.

    Raises:
        IndexError: There is no such sample.
        ValueError: There is no heat map, or the image is none.
    """
    count = len(attribution.values)
    if not -count <= sample < count:
        raise IndexError(f"sample={sample} is out of range; the batch has {count}")
    heat, described = attribution.heatmap[sample], attribution.preprocessing
    lines = [line for line in (title, attribution.label(sample)) if line]
    if image is None:
        pixels = input_pixels(attribution.inputs[sample], described)
        return Panel(pixels, heat, _whole(pixels), "\n".join(lines))
    pixels = image_pixels(image)
    box = crop_box(pixels.shape[0], pixels.shape[1], described)
    return Panel(pixels, heat, box or _whole(pixels), "\n".join(lines))


def draw(panels: Sequence[Panel], title: str, alpha: float = 0.5) -> Figure:
    """Draw panels in a grid that is about square, with one colour bar."""
    columns = math.ceil(math.sqrt(len(panels)))
    rows = math.ceil(len(panels) / columns)
    width = 4.2 if len(panels) == 1 else 2.8
    height = width * min(max(panels[0].pixels.shape[0] / panels[0].pixels.shape[1], 0.5), 2.0)
    figure = Figure(figsize=(width * columns + 1.2, (height + 0.4) * rows + 0.5), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    shown = [_draw_panel(axes, one, alpha) for axes, one in zip(grid.flat, panels, strict=False)]
    figure.colorbar(shown[-1], ax=list(grid.flat), shrink=0.8, label="attribution, 0 to 1")
    figure.suptitle(_plain(title), fontsize=10)
    return figure


def _whole(pixels: Array) -> tuple[float, float, float, float]:
    return -0.5, pixels.shape[1] - 0.5, pixels.shape[0] - 0.5, -0.5


def _draw_panel(axes: Axes, one: Panel, alpha: float) -> AxesImage:
    axes.imshow(one.pixels, cmap="gray", vmin=0, vmax=1)
    shown = axes.imshow(one.heat, cmap=_COLOURS, alpha=alpha, vmin=0, vmax=1, extent=one.box)
    left, right, bottom, top = _whole(one.pixels)
    axes.set_xlim(left, right)
    axes.set_ylim(bottom, top)
    axes.set_title(_plain(one.title), fontsize=9)
    return shown


def _plain(text: str) -> str:
    return text.replace("$", r"\$")  # no mathematics
