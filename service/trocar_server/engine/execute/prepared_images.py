"""Prepared images: decoded, resized and normalised outside of the thread that owns torch."""

from collections.abc import Sequence

import numpy as np
from PIL import Image

from trocar_server.decoding.headers import ImageHeader
from trocar_server.decoding.pixels import fitted, image_from_pixels
from trocar_server.engine.execute.image_decoder import ImageDecoder, in_order, naming_image
from trocar_server.engine.request.plan import ImageSpec, Payload
from trocar_server.models.fitting import Fitting, Values

DecodedImages = list[Image.Image] | Values
"""Images of one argument: as decoded, or the batch that the model takes."""
Steps = list[tuple[int, ...]]


async def prepared_images(
    fitting: Fitting | None,
    headers: Sequence[ImageHeader | None],
    image_specs: Sequence[ImageSpec],
    payloads: Sequence[Payload],
    max_pixels: int,
    decoder: ImageDecoder,
) -> Values | None:
    """Return a batch of images as the model takes it; None where torch has to prepare one of them.

    Args:
        fitting: Of the model's preprocessing.
        headers: Headers of the images; None for one that was sent as pixels.
        image_specs: What the request says of them.
        payloads: Their bytes.
        max_pixels: The most pixels of one image.
        decoder: Decodes them.

    Returns:
        (batch, 3, height, width), float32.

    Raises:
        ServiceError: `INVALID_IMAGE`, `INVALID_TENSOR` or `IMAGE_TOO_LARGE`, naming the image's position.
    """
    steps = _steps_of(fitting, headers, image_specs)
    if fitting is None or steps is None:
        return None
    batch = np.empty((len(headers), 3, *fitting.size), np.float32)

    async def one(index: int) -> None:
        header, image_spec, data, row = headers[index], image_specs[index], payloads[index].data, batch[index]
        with naming_image(index):
            if header is not None:
                await decoder.prepare(data, header, max_pixels, fitting, steps[index], row)
            else:
                await decoder.aside(lambda: _fill(fitting, steps[index], image_spec, data, row))

    await in_order(one(index) for index in range(len(headers)))
    return batch


def _fill(fitting: Fitting, steps: Steps, image_spec: ImageSpec, data: memoryview, row: Values) -> None:
    """Prepare an image that was sent as pixels. Pillow and NumPy let other threads run meanwhile."""
    image = image_from_pixels(image_spec.height, image_spec.width, data)
    fitting.fill(fitted(image, steps).tobytes(), row)


def _steps_of(
    fitting: Fitting | None, headers: Sequence[ImageHeader | None], image_specs: Sequence[ImageSpec]
) -> list[Steps] | None:
    """Return the steps for each image, as stored and turned: EXIF data, read later, may turn it."""
    if fitting is None:
        return None
    result: list[Steps] = []
    for header, image_spec in zip(headers, image_specs, strict=True):
        stored = image_spec if header is None else header
        sizes = ((stored.height, stored.width), (stored.width, stored.height))
        own = [each for each in map(fitting.steps, sizes) if each is not None]
        if len(own) < len(sizes):
            return None
        result.append(own)
    return result
