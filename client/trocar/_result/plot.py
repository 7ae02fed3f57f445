"""Plots of feature maps; needs matplotlib."""

import math

import numpy as np

from trocar._base.dimensions import Described, arranged
from trocar._base.figures import Figure
from trocar._base.tensors import Array


def draw(values: Array, *, title: str, channels: int, described: Described | None = None) -> Figure:
    """Draw sample 0 of a feature map; see `FeatureMaps.plot`.

    Raises:
        ValueError: It has not one or two dimensions of positions, or a dimension is empty.
    """
    names = ("token", "width")
    known = arranged(values, described) if values.ndim > 2 else None
    if known is not None:
        values, names = known.with_patches(), (known.names[2] or "position", "channel")
        values = values if values.ndim > 3 else values.swapaxes(1, 2)
    if values.ndim not in (2, 3, 4) or not values.size or channels < 1:
        raise ValueError(f"cannot draw values of shape {values.shape}; rank 2, 3 or 4 and one channel needed")
    sample = np.abs(values[0]) if np.iscomplexobj(values) else values[0].astype(np.float32)
    if sample.ndim == 3:
        figure = _grid(sample[:channels])
        title = f"{title}: {min(channels, len(sample))} of {len(sample)} channels"
    else:
        figure = _single(sample, names)
    figure.suptitle(f"{title}, sample 0")
    return figure


def _grid(images: Array) -> Figure:
    """Draw images of shape (channels, height, width) in a grid that is about square."""
    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    figure = Figure(figsize=(1.6 * columns, 1.7 * rows + 0.5), layout="constrained")
    for axes in figure.subplots(rows, columns, squeeze=False).flat:
        axes.set_axis_off()
    for channel, (axes, image) in enumerate(zip(figure.axes, images, strict=False)):
        axes.imshow(image, cmap="viridis", interpolation="nearest")
        axes.set_title(str(channel), fontsize=7, pad=2)
    return figure


def _single(sample: Array, names: tuple[str, str]) -> Figure:
    """Draw (positions, channels) as one image, or (features,) as a line."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    if sample.ndim == 1:
        axes.plot(sample, linewidth=0.8)
        axes.set_xlabel("feature")
        return figure
    image = axes.imshow(sample, cmap="viridis", aspect="auto", interpolation="nearest")
    axes.set_xlabel(names[1])
    axes.set_ylabel(names[0])
    figure.colorbar(image)
    return figure
