"""RGB conversion of PIL images, as the server does it: upright, 16 bits scaled to 8.

The same picture gives the same features, whether it is sent as a path, as bytes or as a PIL image.
"""

from typing import Any

import numpy as np

from trocar._base.tensors import Array

_ORIENTATION = 0x0112
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""By EXIF orientation, the `PIL.Image.Transpose` that `PIL.ImageOps.exif_transpose` does."""


def rgb_image(image: Any) -> Any:
    """Return a PIL image in RGB: turned as its EXIF data says, 16 bits of grey as round(value / 257).

    Transparency is dropped. To keep the pixels as they are, pass `np.asarray(image.convert("RGB"))`.

    Raises:
        ValueError: Its values are 32 bits wide, for which there is no standard range.
    """
    turn = _TURNS.get(_orientation(image))
    mode = str(getattr(image, "mode", ""))
    if mode.startswith("I;16") or mode in ("I", "F"):
        image = _scaled(image, mode)
    if "transparency" in getattr(image, "info", {}):
        image = image.copy()  # the caller's keeps it
        del image.info["transparency"]  # convert() would warn about it and drop it
    converted = image.convert("RGB")
    return converted if turn is None else converted.transpose(turn)


def rgb_pixels(image: Any) -> Array:
    """Return the values of a PIL image, uint8 (height, width, 3); see `rgb_image`.

    Raises:
        ValueError: As `rgb_image`.
    """
    return np.asarray(rgb_image(image))


def _orientation(image: Any) -> Any:
    try:
        return image.getexif().get(_ORIENTATION)
    except Exception:  # noqa: BLE001 - unreadable EXIF data turns nothing, and Pillow raises anything
        return None


def _scaled(image: Any, mode: str) -> Any:
    from PIL import Image  # there, as an image of it was passed

    values = np.asarray(image)
    if mode == "F" or (mode == "I" and values.size and not 0 <= values.min() <= values.max() < 1 << 16):
        raise ValueError(
            f"an image of mode '{mode}' has no defined value range; scale it to 0 to 255 and "
            "send it as uint8, or send an array"
        )
    return Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))
