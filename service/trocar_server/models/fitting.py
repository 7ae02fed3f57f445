"""Image preprocessing without torch: resize and normalisation, for images that all end in one size.

    fitting = preprocessor.fitting
    steps = fitting.steps((427, 640))       # what Pillow does, for example in another process
    fitting.fill(pixels, batch[0])          # 8-bit values to the model's numbers, with the same bits

# Note: [Images prepared without torch]
One thread owns torch, and a resize there keeps the model waiting: 3.6 ms for a photo of 640 x 427, of which
Pillow takes 2.3 and the arithmetic 1.3. Pillow may resize in any process. The arithmetic (scale, subtract the
mean, divide by the deviation) is done value by value, and 8 bits have 256 values: a table of torch's own
results has its bits, and NumPy looks them up in 0.3 ms on any thread.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trocar_server.models.image_rules import ImageRules, Size

Values = np.ndarray[Any, np.dtype[np.float32]]

_LEVELS = 256


@dataclass(frozen=True, eq=False)
class Fitting:
    """How images become rows of a batch, bit-equal to the preprocessing."""

    size: Size
    """Height and width of every prepared image."""
    resize: tuple[int, ...]
    """Pixels of the shorter side, or (height, width); none keeps the size."""
    resampling: int
    """Pillow's number of the filter."""
    rules: ImageRules
    most_pixels: int
    """After the resize; larger images are resized in parts, by the preprocessing itself."""
    table: Values
    """(3, 256): the model's number for each 8-bit value of a channel."""

    def steps(self, size: Size) -> tuple[int, ...] | None:
        """Return what `decoding.pixels.fitted` does with an image of a size; None where it cannot.

        Args:
            size: Height and width of the image.
        """
        height, width = self.rules.resized(size, self.resize)
        if height < self.size[0] or width < self.size[1] or height * width > self.most_pixels:
            return None
        top, left = (
            self.rules.crop_start(side, kept) for side, kept in zip((height, width), self.size, strict=True)
        )
        box = (left, top, left + self.size[1], top + self.size[0])
        return (*size, height, width, *box, self.resampling)

    def fill(self, pixels: bytes | bytearray, row: Values) -> None:
        """Write the model's numbers for the RGB values of a fitted image; any thread.

        Args:
            pixels: 8-bit values, (height, width, 3).
            row: (3, height, width), float32; overwritten.
        """
        levels = np.frombuffer(pixels, np.uint8).reshape(*self.size, 3)
        for channel in range(3):
            # Every index is in the table, so that none is clipped; `raise` would copy the row first.
            np.take(self.table[channel], levels[:, :, channel], out=row[channel], mode="clip")


def table_of(finish: Callable[[Image.Image], Tensor]) -> Values:
    """Return what the last steps of a preprocessing make of each 8-bit value: (3, 256), float32. Calls torch.

    Args:
        finish: Scales and normalises a resized and cropped image.
    """
    ramp = np.repeat(np.arange(_LEVELS, dtype=np.uint8)[np.newaxis, :, np.newaxis], 3, axis=2)
    with torch.device("cpu"):  # also where a model is built on "meta"
        table: Values = finish(Image.fromarray(ramp)).numpy().reshape(3, _LEVELS)
    return np.ascontiguousarray(table)
