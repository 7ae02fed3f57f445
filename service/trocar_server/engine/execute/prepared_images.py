"""Prepared images: decoded, resized and normalised outside of the thread that owns torch."""

from collections.abc import Sequence

import numpy as np
from PIL import Image

from trocar_server.decoding.headers import ImageHeader
from trocar_server.engine.execute.image_decoder import ImageDecoder, in_order, naming_image
from trocar_server.engine.request.plan import Payload
from trocar_server.models.fitting import Fitting, Values

DecodedImages = list[Image.Image] | Values
"""Images of one argument: as decoded, or the batch that the model takes."""
Steps = list[tuple[int, ...]]


async def prepared_images(
    fitting: Fitting | None,
    headers: Sequence[ImageHeader | None],
    payloads: Sequence[Payload],
    max_pixels: int,
    decoder: ImageDecoder,
) -> Values | None:
    """Return a batch of images as the model takes it; None where torch has to prepare one of them.

    Args:
        fitting: Of the model's preprocessing.
        headers: Headers of the images; None for one that was sent as pixels.
        payloads: Their bytes.
        max_pixels: The most pixels of one image.
        decoder: Decodes them.

    Returns:
        (batch, 3, height, width), float32.

    Raises:
        ServiceError: `INVALID_IMAGE` or `IMAGE_TOO_LARGE`, naming the image's position.
    """
    steps = _steps_of(fitting, headers)
    if fitting is None or steps is None:
        return None
    batch = np.empty((len(headers), 3, *fitting.size), np.float32)

    async def one(index: int, header: ImageHeader) -> None:
        with naming_image(index):
            data, row = payloads[index].data, batch[index]
            await decoder.prepare(data, header, max_pixels, fitting, steps[index], row)

    await in_order(one(index, header) for index, header in enumerate(headers) if header is not None)
    return batch


def _steps_of(fitting: Fitting | None, headers: Sequence[ImageHeader | None]) -> list[Steps] | None:
    """Return the steps for each image as stored and turned: EXIF data, read later, may turn it."""
    found: list[Steps] = []
    for header in headers:
        if fitting is None or header is None:
            return None
        stored, turned = (
            fitting.steps((header.height, header.width)),
            fitting.steps((header.width, header.height)),
        )
        if stored is None or turned is None:
            return None
        found.append([stored, turned])
    return found
