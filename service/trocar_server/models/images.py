"""Encoded images and raw pixels to PIL images, without torch: any thread may call this.

Pillow only, because it can be told the largest size before it decodes: torchvision's own decoder has
no guard (a PNG of 1.1 MiB took 1.15 GiB).

EXIF orientation is not applied: the pixels are those of `Image.open(...).convert("RGB")`, which is
what torchvision's transforms are usually given.
"""

import io

from PIL import Image
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

MAX_DECODED_BYTES = 64 << 20
"""The most bytes that one decoded image may have, whatever the pixel limit says."""


def decode_image(data: bytes, max_pixels: int) -> Image.Image:
    """Decode a JPEG, PNG or WebP image to RGB. The format is told by the content, never by a name.

    The header is checked against `max_pixels` and `MAX_DECODED_BYTES` before any pixel is decoded.
    Of an animation the first frame is taken; transparency is dropped.

    Raises:
        ServiceError: `INVALID_IMAGE`, the bytes are no such image, damaged or cut off;
            `IMAGE_TOO_LARGE`.
    """
    image = _opened(data, max_pixels)
    try:
        image.load()
        image.info.pop("transparency", None)  # convert() would warn about it and drop it
        return image.convert("RGB")
    except Exception as error:
        raise _damaged(type(image)) from error


def check_image(data: bytes, max_pixels: int) -> None:
    """Look at an image's header alone; `decode_image` would refuse what this does.

    Raises:
        ServiceError: `INVALID_IMAGE` or `IMAGE_TOO_LARGE`.
    """
    _opened(data, max_pixels)


def image_from_pixels(height: int, width: int, data: bytes) -> Image.Image:
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


def _opened(data: bytes, max_pixels: int) -> ImageFile:
    """Read the header, and check the size that it tells."""
    opener = _opener(data)
    # The plugin is called directly, because `Image.open` judges the size by a global variable and
    # tells of it by a warning (Pillow 12 and 13).
    if opener is WebPImageFile:
        _check_size(*_webp_size(data), 3, max_pixels)  # its decoder takes memory when it is opened
    try:
        image = opener(io.BytesIO(data))
    except Exception as error:  # SyntaxError, OSError, struct.error: Pillow's headers raise anything
        raise _damaged(opener) from error
    _check_size(image.width, image.height, len(image.getbands()), max_pixels)
    return image


def _opener(data: bytes) -> type[ImageFile]:
    if data.startswith(b"\xff\xd8\xff"):
        return JpegImageFile
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return PngImageFile
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return WebPImageFile
    raise ServiceError(
        ErrorReason.INVALID_IMAGE,
        f"the {len(data)} bytes are no JPEG, PNG or WebP image; convert it to one of these, or send an array",
    )


def _check_size(width: int, height: int, bands: int, max_pixels: int) -> None:
    decoded_bytes = width * height * max(3, bands)
    if width * height > max_pixels or decoded_bytes > MAX_DECODED_BYTES:
        raise ServiceError(
            ErrorReason.IMAGE_TOO_LARGE,
            f"the image has {width} x {height} pixels, {decoded_bytes} bytes decoded; the limits are "
            f"{max_pixels} pixels and {MAX_DECODED_BYTES} bytes: make it smaller before sending",
        )


def _webp_size(data: bytes) -> tuple[int, int]:
    """Read (width, height) from a WebP header; (0, 0) where Pillow will find no image either.

    Layout: developers.google.com/speed/webp/docs/riff_container and RFC 6386, section 9.1.
    """
    kind = data[12:16]
    if kind == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":
        return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
    return 0, 0


def _damaged(opener: type[ImageFile]) -> ServiceError:
    name = opener.format or "encoded"
    return ServiceError(
        ErrorReason.INVALID_IMAGE, f"the {name} image does not decode; it is damaged or cut off"
    )
