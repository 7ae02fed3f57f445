"""From what a source gives to what is sent; on the reading threads, so that the model need not wait."""

import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from trocar._datasets.sample import Sample
from trocar._datasets.sources.arrays import is_pixels
from trocar._datasets.sources.files import read_file
from trocar._inputs import is_pil
from trocar._tensors import MAX_RANK, WIRE_DTYPES, Array, as_numpy, is_array
from trocar.errors import DatasetError, SourceError

Value: TypeAlias = Array | bytes
Decoder: TypeAlias = Callable[[bytes], Value]


@dataclass(frozen=True)
class Loaded:
    """A sample that is ready to be sent, or the reason why it never will be."""

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
        """Whether the server preprocesses it; images and arrays do not go into one batch."""
        return isinstance(self.value, bytes) or (self.value is not None and is_pixels(self.value))


def load(index: int, sample: Sample, decoder: Decoder) -> Loaded:
    """Read a sample and decode it; a failure is part of the result, as only its batch may care."""
    try:
        value = as_value(sample.load(), decoder)
    except Exception as error:  # noqa: BLE001 - whatever a file, Pillow or the user's dataset raises
        return Loaded(index, sample.key, None, error, sample.fraction)
    return Loaded(index, sample.key, value, None, sample.fraction)


def as_value(given: Any, decoder: Decoder) -> Value:
    """Return what is sent for what a source gave.

    Raises:
        SourceError: It is of a kind that no model takes.
    """
    if isinstance(given, (bytes, bytearray, memoryview)):
        return decoder(bytes(given))
    if is_pil(given):
        return np.asarray(given.convert("RGB"))
    if isinstance(given, (str, os.PathLike)):
        return decoder(read_file(Path(given)))
    if is_array(given):
        if "bfloat16" in str(getattr(given, "dtype", "")):
            raise SourceError(
                "a bfloat16 tensor cannot be put into a batch without torch; convert it to float32"
            )
        return _sendable(as_numpy(given))
    raise SourceError(
        f"a sample is {type(given).__name__}; a dataset gives arrays, tensors, PIL images, encoded bytes or "
        "paths, or a tuple whose first element is one of these"
    )


def _sendable(array: Array) -> Array:
    if array.dtype.name not in WIRE_DTYPES:
        raise SourceError(
            f"a sample is an array of {array.dtype}; convert it to one of {', '.join(WIRE_DTYPES)}"
        )
    if array.ndim >= MAX_RANK:
        raise SourceError(f"a sample has {array.ndim} dimensions; with the batch, {MAX_RANK} are the most")
    return array


def keep_encoded(data: bytes) -> Value:
    """Leave the decoding to the server."""
    return data


def client_decoder(max_pixels: int) -> Decoder:
    """Return a function that decodes an image to uint8 RGB pixels (height, width, 3).

    As the server does: the first frame, transparency dropped, EXIF orientation not applied. Any format
    that Pillow reads will do.

    Args:
        max_pixels: Larger images are refused before they are decoded, as the server would.

    Raises:
        DatasetError: Pillow is not installed.
    """
    try:
        from PIL import Image
    except ImportError as error:
        raise DatasetError('--decode client needs Pillow: pip install "trocar[datasets]"') from error

    def decode(data: bytes) -> Value:
        try:
            with Image.open(io.BytesIO(data)) as image:
                if image.width * image.height > max_pixels:
                    raise SourceError(
                        f"the image has {image.width} x {image.height} pixels; the limit is {max_pixels}"
                    )
                image.load()
                image.info.pop("transparency", None)  # convert() would warn about it and drop it
                return np.asarray(image.convert("RGB"))
        except SourceError:
            raise
        except Exception as error:
            # Pillow's readers raise anything: OSError, SyntaxError, ValueError, struct.error. Some messages
            # hold the address of the buffer, which differs from run to run.
            raise SourceError("the image does not decode; it is damaged or of an unknown format") from error

    return decode
