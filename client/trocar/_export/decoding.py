"""Decoding: source samples to model inputs, on the reading threads, so that the model need not wait."""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from trocar._base.input_kinds import is_encoded, is_path, is_pil, is_pixels
from trocar._base.rgb import rgb_pixels
from trocar._base.tensors import MAX_RANK, Array, check_sendable, float_array, is_array
from trocar._extras import need
from trocar._request.nested_inputs import leaves, mapped, shape_of
from trocar._request.texts import Audio, Texts, is_texts, sound_input, text_entry
from trocar._sources.files import read_sample
from trocar._sources.sample import Sample, SoundSample, TextSample
from trocar.errors import SourceError

Value: TypeAlias = Array | bytes | Mapping[str, Any] | Texts | Audio
"""An array, an encoded image, a text, a clip, or keyword arguments: arrays, also in dicts and lists."""
_FLAC_HEADER = 26
"""Bytes of a FLAC file up to the end of its number of samples."""
Decoder: TypeAlias = Callable[[bytes], Value]


@dataclass(frozen=True)
class Loaded:
    """A sample ready to be sent, or the reason why it cannot be."""

    index: int
    """Its place in the source, from 0."""
    key: str
    value: Value | None
    """Encoded bytes, uint8 pixels (height, width, 3), one text or clip, or one row of the model's inputs."""
    error: Exception | None = None
    fraction: float | None = None
    """Which part of the source ends with this sample."""

    @property
    def is_image(self) -> bool:
        """Whether the server preprocesses it."""
        if self.value is None or isinstance(self.value, (Mapping, Texts, Audio)):
            return False
        return isinstance(self.value, bytes) or is_pixels(self.value)

    @property
    def kind(self) -> object:
        """What it is: a batch holds samples of one kind."""
        if isinstance(self.value, Texts):
            return ("text", bool(self.value.images), replace(self.value, entries=(), images=()))
        if isinstance(self.value, Audio):
            return ("sound", sample_count(self.value))
        return "image" if self.is_image else shape_of(self.value)


def load(
    index: int, sample: Sample, decoder: Decoder, max_tokens: int | None = None, *, truncate: bool = False
) -> Loaded:
    """Read a sample and decode it; a failure is part of the result, to be handled with its batch.

    Args:
        index: Its place in the source, from 0.
        sample: The sample.
        decoder: Decodes images.
        max_tokens: The most tokens of a text that says nothing else; the model's maximum when None.
        truncate: Whether longer texts are cut.
    """
    try:
        value = as_value(sample.load(), decoder)
        if isinstance(value, Texts):
            value = replace(
                value, max_tokens=value.max_tokens or max_tokens, truncate=value.truncate or truncate
            )
    except Exception as error:  # noqa: BLE001 - a file, Pillow or the user's dataset may raise anything
        return Loaded(index, sample.key, None, error, sample.fraction)
    return Loaded(index, sample.key, value, None, sample.fraction)


def as_value(given: Any, decoder: Decoder) -> Value:
    """Return the value to send for a source's sample.

    Raises:
        SourceError: It is of a kind that no model takes.
    """
    if (processed := _processed(given)) is not None:
        return processed
    if is_encoded(given):
        return decoder(bytes(given))
    if is_pil(given):
        return _rgb(given)
    if is_path(given):
        read = read_sample(Path(given))
        return decoder(read) if isinstance(read, bytes) else as_value(read, decoder)
    if is_array(given):
        return _sendable(given)
    if isinstance(given, Mapping) and given and all(map(is_array, leaves(given))):
        named: Mapping[str, Any] = mapped(given, _sendable)
        return named
    raise SourceError(
        f"a sample is {type(given).__name__}; a dataset gives arrays, tensors, PIL images, encoded bytes, "
        "paths, texts, sound or dictionaries of arrays, or a tuple whose first element is one of these"
    )


def sample_count(clip: Audio) -> int:
    """Return the samples of one clip: as given, or as its file's header says; 0 where it does not.

    A WAV file has them in its data chunk, a FLAC file in STREAMINFO: https://www.rfc-editor.org/rfc/rfc9639.
    """
    ((result, payload),) = clip.clips
    if result.WhichOneof("form") == "raw":
        return result.raw.sample_count
    data = bytes(payload[:_FLAC_HEADER])
    if data.startswith(b"fLaC") and len(data) == _FLAC_HEADER:
        return int.from_bytes(data[21:26], "big") & ((1 << 36) - 1)
    return _wav_sample_count(payload)


def _wav_sample_count(payload: memoryview) -> int:
    width, position = 0, 12
    while position + 8 <= len(payload):
        kind, size = bytes(payload[position : position + 4]), _number(payload, position + 4, 4)
        if kind == b"fmt ":
            width = _number(payload, position + 20, 2)  # bytes of one sample of all channels
        if kind == b"data":
            return min(size, len(payload) - position - 8) // max(1, width)
        position += 8 + size + size % 2
    return 0


def _number(payload: memoryview, start: int, size: int) -> int:
    return int.from_bytes(payload[start : start + size], "little")


def _processed(given: Any) -> Texts | Audio | None:
    """Return a text or a clip; None for other samples.

    Raises:
        SourceError: It is neither a text, a pair, token ids nor words.
    """
    if isinstance(given, (Texts, Audio)):
        return given
    if isinstance(given, SoundSample):
        return sound_input(given.data, given.rate)
    is_text = isinstance(given, TextSample)
    if not is_text and not is_texts(given):
        return None
    try:
        return Texts((text_entry(given.value if is_text else given),))
    except TypeError as error:
        raise SourceError(str(error)) from error


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
