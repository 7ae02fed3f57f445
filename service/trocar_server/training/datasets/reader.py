"""Samples of a data set, read and decoded outside of the thread that owns torch."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from PIL import Image

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.images import decode_image
from trocar_server.training.datasets.form import DatasetInfo
from trocar_server.training.datasets.header import ITEM_BYTES
from trocar_server.training.datasets.sources import Array, RawSamples, SampleSource

MAX_LOADED_BYTES = 1 << 30
"""Of the samples that are in memory at once, images decoded."""


@dataclass(frozen=True)
class RawSample:
    """One sample as it is stored."""

    inputs: Array | bytes
    """An array, or an encoded image."""
    targets: dict[str, Array]
    """By name."""


@dataclass(frozen=True)
class LoadedSamples:
    """Some samples in memory, images decoded."""

    indices: tuple[int, ...]
    """Which samples of the data set."""
    inputs: Array | list[Image.Image]
    """(samples, ...); or images of any size."""
    targets: dict[str, Array]
    """(samples, ...) by name."""


class DatasetReader:
    """Reads a data set; any thread but the one that owns torch, for images take long.

        reader = library.open("alice", dataset_id)
        for loaded in reader.load_ahead(batches):               # batches of indices
            batch = to_batch(loaded, reader.info, hosted)       # this on the owner thread

    Args:
        source: Where samples come from.
        info: What is known of the data set.
        max_pixels: Of one encoded image.
    """

    def __init__(self, source: SampleSource, info: DatasetInfo, max_pixels: int) -> None:
        self.info = info
        self._source = source
        self._max_pixels = max_pixels

    def __len__(self) -> int:
        return len(self._source)

    def samples(self, indices: Sequence[int]) -> list[RawSample]:
        """Return samples as they are stored, in the order asked for.

        Raises:
            ServiceError: `DATASET_CORRUPT` or `STORAGE_UNAVAILABLE`; `FIT_INVALID`, they are too many.
            IndexError: There is no such sample.
        """
        raw = self._read(indices)
        return [
            RawSample(raw.inputs[row], {name: array[row] for name, array in raw.targets.items()})
            for row in range(len(indices))
        ]

    def arrays(self, indices: Sequence[int]) -> dict[str, Array]:
        """Return samples of arrays, stacked: `inputs`, and each target by its name, `targets` without one.

        Raises:
            ServiceError: As `samples`; `DATASET_INVALID`, they are encoded images.
            IndexError: There is no such sample.
        """
        raw = self._read(indices)
        if isinstance(raw.inputs, list):
            raise ServiceError(
                ErrorReason.DATASET_INVALID, "the data set has encoded images; they make no array as they are"
            )
        named = {name or "targets": array for name, array in raw.targets.items()}
        return {"inputs": raw.inputs, **named}

    def load(self, indices: Sequence[int]) -> LoadedSamples:
        """Return samples with images decoded.

        Raises:
            ServiceError: As `samples`; `DATASET_INVALID`, an image does not decode.
            IndexError: There is no such sample.
        """
        raw = self._read(indices)
        inputs: Array | list[Image.Image]
        inputs = self._decoded(raw) if isinstance(raw.inputs, list) else raw.inputs
        return LoadedSamples(raw.indices, inputs, dict(raw.targets))

    def load_ahead(self, batches: Iterable[Sequence[int]], depth: int = 2) -> Iterator[LoadedSamples]:
        """Load batches on a thread of its own, up to `depth` ahead of the one that is used.

        Raises:
            ServiceError: As `load`, where the batch was due.
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
        """Let go of files."""
        self._source.close()

    def _read(self, indices: Sequence[int]) -> RawSamples:
        form = self._source.form
        sizes = [math.prod(part.shape) * ITEM_BYTES[part.dtype] for part in form.targets.values()]
        if form.inputs is not None:
            sizes.append(math.prod(form.inputs.shape) * ITEM_BYTES[form.inputs.dtype])
        if sum(sizes) * len(indices) > MAX_LOADED_BYTES:
            raise _too_many(len(indices))
        return self._source.read([int(index) for index in indices])

    def _decoded(self, raw: RawSamples) -> list[Image.Image]:
        decoded, byte_count = [], 0
        for index, data in zip(raw.indices, raw.inputs, strict=True):
            try:
                image = decode_image(bytes(data), self._max_pixels)
            except ServiceError as error:
                raise ServiceError(
                    ErrorReason.DATASET_INVALID,
                    f"sample {index} of the data set cannot be used: {error.message}",
                    sample=str(index),
                ) from error
            byte_count += image.width * image.height * 3
            if byte_count > MAX_LOADED_BYTES:
                raise _too_many(len(raw.indices))
            decoded.append(image)
        return decoded


def as_pixels(inputs: Array) -> list[Image.Image]:
    """Return the images of RGB pixels, uint8 (samples, height, width, 3)."""
    return [Image.fromarray(np.ascontiguousarray(pixels)) for pixels in inputs]


def is_pixels(value: Any) -> bool:
    """Tell whether a form or one sample is RGB pixels, which the model's preprocessing takes."""
    return str(value.dtype) == "uint8" and len(value.shape) == 3 and value.shape[-1] == 3


def _too_many(count: int) -> ServiceError:
    return ServiceError(
        ErrorReason.FIT_INVALID,
        f"a batch of {count:,} samples has more than {MAX_LOADED_BYTES:,} bytes; make batch_size smaller",
    )
