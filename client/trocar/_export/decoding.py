"""Decoding: source samples to model inputs, on the reading threads, so that the model need not wait."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from trocar._base.input_kinds import is_encoded, is_path, is_pil, is_pixels
from trocar._base.rgb import rgb_pixels
from trocar._base.tensors import MAX_RANK, Array, check_sendable, float_array, is_array
from trocar._extras import need
from trocar._sources.files import read_file
from trocar._sources.sample import Sample
from trocar.errors import SourceError

Value: TypeAlias = Array | bytes
Decoder: TypeAlias = Callable[[bytes], Value]


@dataclass(frozen=True)
class Loaded:
    """A sample ready to be sent, or the reason why it cannot be."""

    index: int
    """Its place in the source, from 0."""
    key: str
    value: Value | None
    """Encoded bytes, uint8 pixels (height, width, 3), or one row of the model's input."""
    error: Exception | None = None
    fraction: float | None = None
    """Which part of the source ends with this sample."""

    @property
    def is_image(self) -> bool:
        """Whether the server preprocesses it; a batch does not mix images and arrays."""
        return isinstance(self.value, bytes) or (self.value is not None and is_pixels(self.value))


def load(index: int, sample: Sample, decoder: Decoder) -> Loaded:
    """Read a sample and decode it; a failure is part of the result, to be handled with its batch."""
    try:
        value = as_value(sample.load(), decoder)
    except Exception as error:  # noqa: BLE001 - a file, Pillow or the user's dataset may raise anything
        return Loaded(index, sample.key, None, error, sample.fraction)
    return Loaded(index, sample.key, value, None, sample.fraction)


def as_value(given: Any, decoder: Decoder) -> Value:
    """Return the value to send for a source's sample.

    Raises:
        SourceError: It is of a kind that no model takes.
    """
    if is_encoded(given):
        return decoder(bytes(given))
    if is_pil(given):
        return _rgb(given)
    if is_path(given):
        return decoder(read_file(Path(given)))
    if is_array(given):
        return _sendable(given)
    raise SourceError(
        f"a sample is {type(given).__name__}; a dataset gives arrays, tensors, PIL images, encoded bytes or "
        "paths, or a tuple whose first element is one of these"
    )


def _rgb(image: Any) -> Array:
    try:
        return rgb_pixels(image)
    except ValueError as error:
        raise SourceError(str(error)) from error


def _sendable(given: object) -> Array:
    try:
        array = float_array(given)
        check_sendable(array, array.dtype.name)
    except TypeError as error:
        raise SourceError(f"a sample: {error}") from error
    if array.ndim >= MAX_RANK:
        raise SourceError(f"a sample has {array.ndim} dimensions; with the batch, {MAX_RANK} are the most")
    return array


def keep_encoded(data: bytes) -> Value:
    """Return encoded bytes as they are; the server decodes them."""
    return data


def client_decoder(max_pixels: int) -> Decoder:
    """Return a function that decodes an image to uint8 RGB pixels (height, width, 3).

    As the server does: the first frame, transparency dropped, turned as EXIF data says, 16 bits of grey
    scaled to 8. Any format that Pillow reads will do.

    Args:
        max_pixels: Larger images are rejected before they are decoded, as on the server.

    Raises:
        MissingExtraError: Pillow is not installed.
    """
    need('decode="client"', "datasets", "PIL.Image")
    from PIL import Image

    def decode(data: bytes) -> Value:
        try:
            with Image.open(io.BytesIO(data)) as image:
                if image.width * image.height > max_pixels:
                    raise SourceError(
                        f"the image has {image.width} x {image.height} pixels; the limit is {max_pixels}"
                    )
                image.load()
                return _rgb(image)
        except SourceError:
            raise
        except Exception as error:
            # Pillow's readers raise anything: OSError, SyntaxError, ValueError, struct.error. Some messages
            # contain the address of the buffer, which differs from run to run.
            raise SourceError("the image does not decode; it is damaged or of an unknown format") from error

    return decode
