"""Pixels of images and of models' inputs, 0 to 1, and where one lies in the other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from trocar._base.input_kinds import is_path, is_pil
from trocar._base.rgb import rgb_pixels
from trocar._base.tensors import Array, float_array

if TYPE_CHECKING:
    from trocar._base.types import Preprocessing


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
