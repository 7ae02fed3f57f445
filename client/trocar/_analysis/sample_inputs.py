"""Inputs of single samples, kept for pictures: images with the part that the model sees, and texts."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from trocar._attribution.image_pixels import crop_box, image_pixels, input_pixels
from trocar._base.input_kinds import is_encoded, is_image, is_path, is_pixels
from trocar._base.names import shortened
from trocar._base.tensors import Array, float_array, is_array
from trocar._request.nested_inputs import is_shared
from trocar._request.stored.stored_samples import StoredSamples
from trocar._request.texts import Audio, Texts, names_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from trocar._base.types import Preprocessing

_LINE, _MOST_TEXT = 22, 200


@dataclass(frozen=True)
class SampleImage:
    """The pixels of a sample, and where in them the model's input lies."""

    pixels: Array
    """Of shape (height, width, 3) or (height, width), 0 to 1."""
    box: tuple[float, float, float, float]
    """The model's input: left, right, bottom, top in pixels, beyond the image where it was padded."""

    @property
    def extent(self) -> tuple[float, float, float, float]:
        """The whole image as such a box."""
        return _whole(self.pixels)


def sample_input(inputs: Any, position: int) -> Any:
    """Return the input of one sample of a batch; a mapping where a model takes several arguments.

    None of samples on the server, which nobody has here.
    """
    if isinstance(inputs, (Texts, Audio)):
        return inputs.part(position, position + 1)
    if isinstance(inputs, tuple):
        return {str(place): sample_input(value, position) for place, value in enumerate(inputs)}
    if isinstance(inputs, Mapping):
        return {name: sample_input(value, position) for name, value in inputs.items() if not is_shared(value)}
    if isinstance(inputs, list) or (is_array(inputs) and not is_pixels(inputs)):
        return inputs[position]
    return None if isinstance(inputs, StoredSamples) else inputs  # a batch of one image or text


def sample_image(value: Any, preprocessing: Preprocessing | None) -> SampleImage | None:
    """Return the pixels of a sample; None if it is no image.

    Args:
        value: The result of `sample_input`.
        preprocessing: The model's own, without which arrays are no images.

    Raises:
        FileNotFoundError: The path of an image does not exist any more.
    """
    if isinstance(value, Mapping):
        images = (sample_image(item, preprocessing) for item in value.values())
        return next((image for image in images if image is not None), None)
    if isinstance(value, str) and not names_file(value):
        return None
    if is_image(value):
        pixels = image_pixels(_opened(value))
        box = crop_box(pixels.shape[0], pixels.shape[1], preprocessing)
        return SampleImage(pixels, box or _whole(pixels))
    if preprocessing is None or not is_array(value):
        return None
    array = float_array(value)
    if array.ndim != 3:  # a model with a preprocessing takes (channels, height, width)
        return None
    pixels = input_pixels(array, preprocessing)
    return SampleImage(pixels, _whole(pixels))


def sample_text(value: Any) -> str:
    """Return the text of a sample; empty if it is none."""
    if isinstance(value, Mapping):
        return next(filter(None, map(sample_text, value.values())), "")
    if isinstance(value, Texts):
        return value.label(0)
    return value if isinstance(value, str) else ""


def box_in(image: SampleImage, share: tuple[float, float, float, float]) -> tuple[float, float, float, float]:
    """Return the place of a share of the model's input in the image: left, right, top, bottom in pixels.

    Args:
        image: The image.
        share: Left, right, top, bottom of the model's input, 0 to 1.
    """
    left, right, bottom, top = image.box
    width, height = right - left, bottom - top
    return (
        left + share[0] * width,
        left + share[1] * width,
        top + share[2] * height,
        top + share[3] * height,
    )


def crop_of(image: SampleImage, share: tuple[float, float, float, float]) -> Array:
    """Return the pixels of a share of the model's input, at least one; see `box_in`.

    Where the model saw padding around the image, that part has no pixels and is left out.
    """
    left, right, top, bottom = box_in(image, share)
    rows = _pixels(top, bottom, image.pixels.shape[0])
    return image.pixels[rows, _pixels(left, right, image.pixels.shape[1])]


def _pixels(low: float, high: float, size: int) -> slice:
    """Return the pixels whose middles lie between two edges, at least one."""
    start = min(max(round(low + 0.5), 0), size - 1)
    return slice(start, max(start + 1, min(round(high + 0.5), size)))


def draw_sample(axes: Axes, value: Any, preprocessing: Preprocessing | None, name: str) -> None:
    """Draw a sample: the picture, or its text, or its name."""
    image = None if value is None else sample_image(value, preprocessing)
    axes.set_axis_off()
    if image is None:
        draw_text(axes, sample_text(value) or name)
        return
    axes.imshow(image.pixels, cmap="gray", vmin=0, vmax=1)


def draw_text(axes: Axes, text: str) -> None:
    """Write a text into an empty panel, in lines."""
    axes.set_axis_off()
    lines = textwrap.fill(shortened(text, _MOST_TEXT), _LINE).replace("$", r"\$")  # no mathematics
    axes.text(0.5, 0.5, lines, ha="center", va="center", fontsize=7, transform=axes.transAxes)


def _opened(value: Any) -> Any:
    from PIL import Image  # a dependency of matplotlib, which draws it

    return Image.open(BytesIO(value)) if is_encoded(value) and not is_path(value) else value


def _whole(pixels: Array) -> tuple[float, float, float, float]:
    return -0.5, pixels.shape[1] - 0.5, pixels.shape[0] - 0.5, -0.5
