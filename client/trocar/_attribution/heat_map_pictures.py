"""Heat maps over images; needs matplotlib."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trocar._base.figures import Figure
from trocar._base.input_kinds import is_path, is_pil
from trocar._base.rgb import rgb_pixels
from trocar._base.tensors import Array, float_array

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.image import AxesImage

    from trocar._attribution.attribution import Attribution
    from trocar._base.types import Preprocessing

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


def input_pixels(values: Array, preprocessing: Preprocessing | None) -> Array:
    """Turn a model's input, (channels, height, width), back into an image from 0 to 1.

    Mean, standard deviation and scale of the preprocessing are undone; without one, the values are stretched.
    """
    channels = len(values)
    pixels = np.moveaxis(values.astype(np.float64), 0, -1)
    if preprocessing is not None and len(preprocessing.mean) == len(preprocessing.std) == channels:
        scaled = pixels * np.array(preprocessing.std) + np.array(preprocessing.mean)
        pixels = scaled / (255 * preprocessing.scale)
    else:
        low, high = np.nanmin(pixels, initial=np.inf), np.nanmax(pixels, initial=-np.inf)
        pixels = (pixels - low) / max(high - low, 1e-12)
    if channels not in (1, 3):
        pixels = pixels.mean(axis=-1, keepdims=True)
    clean = np.clip(np.nan_to_num(pixels), 0, 1)
    return clean[..., 0] if clean.shape[-1] == 1 else clean


def image_pixels(image: object) -> Array:
    """Read an image: a path, a PIL image, or pixels; uint8 becomes 0 to 1.

    Raises:
        FileNotFoundError: A path does not exist.
        ValueError: It is no image.
    """
    if is_path(image):
        from PIL import Image  # a dependency of matplotlib

        with Image.open(image) as opened:
            return image_pixels(opened)
    pixels = rgb_pixels(image) if is_pil(image) else float_array(image)
    if pixels.ndim not in (2, 3) or (pixels.ndim == 3 and pixels.shape[2] not in (3, 4)) or not pixels.size:
        raise ValueError(f"an image has shape (height, width, 3), not {pixels.shape}")
    return pixels / 255 if pixels.dtype == np.uint8 else np.clip(pixels.astype(np.float64), 0, 1)


def crop_box(
    height: int, width: int, preprocessing: Preprocessing | None
) -> tuple[float, float, float, float] | None:
    """Return the box of the model's input in its original image; None for all of it.

    Left, right, bottom, top in pixels, after the resize and centre crop of the preprocessing.
    """
    if preprocessing is None or not preprocessing.crop:
        return None
    crop_height, crop_width = preprocessing.crop
    vertical = horizontal = 1.0
    if len(preprocessing.resize) == 1:
        vertical = horizontal = preprocessing.resize[0] / min(height, width)
    elif preprocessing.resize:
        vertical, horizontal = preprocessing.resize[0] / height, preprocessing.resize[1] / width
    seen_height, seen_width = crop_height / vertical, crop_width / horizontal
    left, top = (width - seen_width) / 2 - 0.5, (height - seen_height) / 2 - 0.5
    return left, left + seen_width, top + seen_height, top


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
