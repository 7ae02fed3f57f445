"""Data set reader: reads and decodes samples outside of torch's owner thread."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from PIL import Image

from trocar_api.reasons import ErrorReason
from trocar_server.decoding.pixels import decode_image
from trocar_server.errors import ServiceError
from trocar_server.processing.inputs import TextEntry
from trocar_server.storage.tensor_header import ITEM_BYTES
from trocar_server.training.datasets.dataset_schema import DatasetInfo
from trocar_server.training.datasets.sample_sources import (
    MAX_LOADED_BYTES,
    Array,
    RawSamples,
    SampleSource,
    too_many,
)
from trocar_server.training.datasets.stored_sound import Clips
from trocar_server.training.datasets.stored_text import text_of_sample

_CHARACTER_BYTES = 4

Decode = Callable[[bytes, int], Image.Image]
"""Decodes an image to RGB, given its bytes and the most pixels allowed; fails with a `ServiceError`."""


@dataclass(frozen=True)
class RawSample:
    """One sample as stored."""

    inputs: Array | bytes
    """An array, or an encoded image, text or clip."""
    targets: dict[str, Array]
    """By name."""


@dataclass(frozen=True)
class LoadedSamples:
    """Several samples in memory, images decoded."""

    indices: tuple[int, ...]
    """Indices of the samples in the data set."""
    inputs: Array | list[Image.Image] | tuple[TextEntry, ...] | Clips
    """(samples, ...); or images of any size; or texts; or sound."""
    targets: dict[str, Array]
    """(samples, ...) by name."""

    @property
    def byte_count(self) -> int:
        """Bytes in memory, of texts about."""
        return _byte_count(self.inputs) + sum(array.nbytes for array in self.targets.values())


class DatasetReader:
    """Reads a data set, on any thread but torch's owner thread, because decoding images takes long.

        reader = library.open("alice", dataset_id)
        for loaded in reader.load_ahead(batches):               # batches of indices
            batch = to_batch(loaded, reader.info, hosted)       # on the owner thread

    Args:
        source: The source of samples.
        info: Metadata of the data set.
        max_pixels: The most pixels of one encoded image.
        decode: Decodes an image; a server has processes for it (`engine.execute.image_decoder`).
    """

    def __init__(
        self, source: SampleSource, info: DatasetInfo, max_pixels: int, decode: Decode = decode_image
    ) -> None:
        self.info = info
        self._decode = decode
        self._source = source
        self._max_pixels = max_pixels

    def __len__(self) -> int:
        return len(self._source)

    def samples(self, indices: Sequence[int]) -> list[RawSample]:
        """Return samples as stored, in the order of the indices.

        Raises:
            ServiceError: `DATASET_CORRUPT` or `STORAGE_UNAVAILABLE`; `FIT_INVALID`, too many samples at once.
            IndexError: There is no such sample.
        """
        raw = self._read(indices)
        return [
            RawSample(raw.inputs[row], {name: array[row] for name, array in raw.targets.items()})
            for row in range(len(indices))
        ]

    def arrays(self, indices: Sequence[int]) -> dict[str, Array]:
        """Return array samples, stacked: `inputs`, and each target by its name, `targets` if it has none.

        Raises:
            ServiceError: As `samples`; `DATASET_INVALID`, they are encoded images, texts or sound.
            IndexError: There is no such sample.
        """
        raw = self._read(indices)
        if isinstance(raw.inputs, list):
            raise ServiceError(
                ErrorReason.DATASET_INVALID,
                "the data set has encoded images, texts or sound; they cannot be returned as one array",
            )
        named = {name or "targets": array for name, array in raw.targets.items()}
        return {"inputs": raw.inputs, **named}

    def load(self, indices: Sequence[int]) -> LoadedSamples:
        """Return samples with images decoded, and texts parsed.

        Raises:
            ServiceError: As `samples`; `DATASET_INVALID`, an image does not decode, a text does not parse.
            IndexError: There is no such sample.
        """
        raw = self._read(indices)
        inputs: Array | list[Image.Image] | tuple[TextEntry, ...] | Clips
        if self._source.signature.is_text:
            inputs = _parsed(raw)
        elif self._source.signature.is_sound:
            inputs = Clips(map(bytes, raw.inputs))
        else:
            inputs = self._decoded(raw) if isinstance(raw.inputs, list) else raw.inputs
        return LoadedSamples(raw.indices, inputs, dict(raw.targets))

    def load_ahead(self, batches: Iterable[Sequence[int]], depth: int = 2) -> Iterator[LoadedSamples]:
        """Prefetch batches on a background thread, up to `depth` ahead of the one in use.

        Raises:
            ServiceError: As `load`, raised when the failed batch is due.
        """
        waiting: deque[Future[LoadedSamples]] = deque()
        remaining = iter(batches)
        with ThreadPoolExecutor(1, thread_name_prefix="trocar-samples") as executor:
            try:
                for indices in islice(remaining, depth):
                    waiting.append(executor.submit(self.load, indices))
                while waiting:
                    loaded = waiting.popleft().result()
                    for indices in islice(remaining, 1):
                        waiting.append(executor.submit(self.load, indices))
                    yield loaded
            finally:
                for future in waiting:
                    future.cancel()

    def close(self) -> None:
        """Close the files."""
        self._source.close()

    def _read(self, indices: Sequence[int]) -> RawSamples:
        signature = self._source.signature
        sizes = [math.prod(part.shape) * ITEM_BYTES[part.dtype] for part in signature.targets.values()]
        if signature.inputs is not None:
            sizes.append(math.prod(signature.inputs.shape) * ITEM_BYTES[signature.inputs.dtype])
        if sum(sizes) * len(indices) > MAX_LOADED_BYTES:
            raise too_many(len(indices))
        return self._source.read([int(index) for index in indices])

    def _decoded(self, raw: RawSamples) -> list[Image.Image]:
        decoded, byte_count = [], 0
        for index, data in zip(raw.indices, raw.inputs, strict=True):
            try:
                image = self._decode(bytes(data), self._max_pixels)
            except ServiceError as error:
                if (
                    error.reason is ErrorReason.CANCELLED
                ):  # the server is stopping: the sample is not at fault
                    raise
                raise ServiceError(
                    ErrorReason.DATASET_INVALID,
                    f"sample {index} of the data set cannot be used: {error.message}",
                    sample=str(index),
                ) from error
            byte_count += image.width * image.height * 3
            if byte_count > MAX_LOADED_BYTES:
                raise too_many(len(raw.indices))
            decoded.append(image)
        return decoded


def _byte_count(inputs: Array | list[Image.Image] | tuple[TextEntry, ...] | Clips) -> int:
    if isinstance(inputs, list):
        return sum(image.width * image.height * 3 for image in inputs)
    if isinstance(inputs, tuple):
        return sum(
            len(entry) if isinstance(entry, bytes) else entry.character_count * _CHARACTER_BYTES
            for entry in inputs
        )
    return int(inputs.nbytes)


def _parsed(raw: RawSamples) -> tuple[TextEntry, ...]:
    samples = zip(raw.indices, raw.inputs, strict=True)
    return tuple(text_of_sample(index, bytes(data)) for index, data in samples)


def as_pixels(inputs: Array) -> list[Image.Image]:
    """Return RGB pixels, uint8 (samples, height, width, 3), as images."""
    return [Image.fromarray(np.ascontiguousarray(pixels)) for pixels in inputs]


def is_pixels(value: Any) -> bool:
    """Whether a signature or one sample is RGB pixels, which the model's preprocessing takes."""
    return str(value.dtype) == "uint8" and len(value.shape) == 3 and value.shape[-1] == 3
