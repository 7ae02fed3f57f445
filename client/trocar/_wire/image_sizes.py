"""Sizes of encoded images, for dry runs of models whose number of tokens depends on them."""

import io
from collections.abc import Iterable, Sequence

from trocar_api.v1 import extraction_pb2 as pb

_ORIENTATION = 0x0112
_TURNED = (5, 6, 7, 8)
"""Values of the EXIF orientation of an image that is shown with its sides exchanged."""


def with_image_sizes(arguments: Sequence[pb.Input], payloads: Iterable[memoryview]) -> list[pb.Input]:
    """Return arguments with the sizes of their encoded images, as far as Pillow is installed and reads them.

    Args:
        arguments: The arguments; changed in place.
        payloads: Those of all.
    """
    remaining = iter(payloads)
    for argument in arguments:
        for _ in range(_others(argument)):
            next(remaining)
        for image in argument.images.images:
            payload = next(remaining)
            size = _size(payload) if image.HasField("encoded_byte_count") else None
            if size is not None:
                image.encoded_size.CopyFrom(size)
    return list(arguments)


def _others(argument: pb.Input) -> int:
    """Return the number of payloads of what is no image."""
    kind = argument.WhichOneof("value")
    if kind == "tensor":
        return 1
    return len(argument.tensors.tensors) if kind == "tensors" else len(argument.audio.clips)


def _size(encoded: memoryview) -> pb.RawImage | None:
    try:
        from PIL import Image
    except ImportError:
        return None
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            width, height = image.size
            if image.getexif().get(_ORIENTATION) in _TURNED:
                width, height = height, width
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):  # the server says what is wrong
        return None
    return pb.RawImage(height=height, width=width)
