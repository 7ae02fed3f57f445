"""Image decoding to RGB PIL images with Pillow. The server itself runs this in separate processes.

Pillow, because it allows a size check before decoding: torchvision's own decoder has no guard
(a PNG of 1.1 MiB took 1.15 GiB).
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from PIL import Image
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from trocar_api.reasons import ErrorReason
from trocar_server.decoding.headers import check_size, damaged, read_header
from trocar_server.errors import ServiceError

_OPENERS: dict[str, type[ImageFile]] = {"JPEG": JpegImageFile, "PNG": PngImageFile, "WEBP": WebPImageFile}
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""By EXIF orientation, as `PIL.ImageOps.exif_transpose` turns."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """Options of the conversion of an image to RGB.

    Attributes:
        orient: Whether it is turned and mirrored as its EXIF data says.
        scale_16_bit: Whether 16 bits of grey become 8 by value / 257, rounded; values over 255 become 255
            otherwise.
    """

    orient: bool = True
    scale_16_bit: bool = True


DEFAULT_CONVERSION = Conversion()


def decode_image(data: bytes, max_pixels: int, conversion: Conversion = DEFAULT_CONVERSION) -> Image.Image:
    """Decode a JPEG, PNG or WebP image to RGB. The format is detected by content, never by name.

    The header is checked before any pixel is decoded. Of an animation the first frame is taken;
    transparency is dropped.

    Raises:
        ServiceError: `INVALID_IMAGE`, the bytes are no such image, damaged or cut off;
            `IMAGE_TOO_LARGE`, see `read_header`.
    """
    format_ = read_header(data, max_pixels).format
    try:
        # The plugin is called directly, because `Image.open` judges the size by a global variable and
        # tells of it by a warning (Pillow 12 and 13).
        image = _OPENERS[format_](io.BytesIO(data))
    except Exception as error:  # SyntaxError, OSError, struct.error: Pillow's headers raise anything
        raise damaged(format_) from error
    check_size(image.width, image.height, len(image.getbands()), max_pixels)
    try:
        image.load()
        return to_rgb(image, conversion)
    except Exception as error:
        raise damaged(format_) from error


def fitted(image: Image.Image, fits: Sequence[Sequence[int]]) -> Image.Image:
    """Resize and crop a decoded image as the entry for its own size says.

    Args:
        image: The image, upright.
        fits: Nine numbers for each size that it may have: its height and width; the height and width that it
            is resized to; left, top, right and bottom of the crop; Pillow's filter.

    Raises:
        ServiceError: `INVALID_IMAGE`, it has none of these sizes.
    """
    for height, width, resized_height, resized_width, left, top, right, bottom, resampling in fits:
        if (height, width) == (image.height, image.width):
            if (resized_height, resized_width) != (height, width):
                image = image.resize((resized_width, resized_height), Image.Resampling(resampling))
            return image.crop((left, top, right, bottom))
    raise damaged("encoded")


def image_from_pixels(height: int, width: int, data: bytes | memoryview) -> Image.Image:
    """Return the image of uint8 values in (height, width, 3) order, red first.

    Raises:
        ServiceError: `INVALID_TENSOR`, the number of bytes is not height * width * 3, or a side is 0.
    """
    if height < 1 or width < 1 or len(data) != height * width * 3:
        raise ServiceError(
            ErrorReason.INVALID_TENSOR,
            f"an image of {height} x {width} RGB pixels has {height * width * 3} bytes, not {len(data)}; "
            "send uint8 values in (height, width, 3) order, each side at least 1",
        )
    return Image.frombytes("RGB", (width, height), data)


def to_rgb(image: Image.Image, conversion: Conversion) -> Image.Image:
    """Bring a loaded image to RGB, upright."""
    turn = _TURNS.get(_orientation(image)) if conversion.orient else None
    image.info.pop("transparency", None)  # convert() would warn about it and drop it
    if image.mode.startswith("I;16") and conversion.scale_16_bit:
        image = image.convert("I").point(_from_16_bits(), "L")
    converted = image.convert("RGB")
    return converted if turn is None else converted.transpose(turn)


def _orientation(image: Image.Image) -> Any:
    try:
        return image.getexif().get(_ORIENTATION)
    except Exception:  # noqa: BLE001 - EXIF data that nobody can read turns nothing, and Pillow raises anything
        return None


@cache
def _from_16_bits() -> list[int]:
    """Return round(value / 257) for each value of 16 bits: 0 stays 0, 65535 becomes 255."""
    return [(value + 128) // 257 for value in range(1 << 16)]
