"""Samples put together to what one pass takes."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trocar._datasets.decoding import Loaded, Value
from trocar._rpc_errors import image_of
from trocar._tensors import Array
from trocar.errors import SourceError


@dataclass(frozen=True)
class Batch:
    """Samples that follow one another in the source."""

    samples: Sequence[Loaded]
    """At least one; those that could not be read are among them."""

    @property
    def readable(self) -> list[Loaded]:
        """The samples that can be sent."""
        return [sample for sample in self.samples if sample.error is None]

    @property
    def name(self) -> str:
        """The batch by its first and last sample, for messages."""
        first, last = self.samples[0].key, self.samples[-1].key
        return first if len(self.samples) == 1 else f"{first} to {last}"

    def place(self, error: Exception) -> str:
        """Name the batch, and the sample in it where the error says which."""
        at = image_of(error)
        readable = self.readable
        if at is None or at >= len(readable) or len(self.samples) == 1:
            return self.name
        return f"{self.name}; image {at} is {readable[at].key}"


def cut(samples: Iterable[Loaded], size: int) -> Iterator[Batch]:
    """Cut samples into batches of at most `size`, in order; images and arrays apart.

    A batch depends only on the samples from its own first one on: cutting may begin at any batch.
    """
    batch: list[Loaded] = []
    is_image: bool | None = None
    for sample in samples:
        if sample.error is None:
            if is_image not in (None, sample.is_image):
                yield Batch(batch)
                batch = []
            is_image = sample.is_image
        batch.append(sample)
        if len(batch) == size:
            yield Batch(batch)
            batch, is_image = [], None
    if batch:
        yield Batch(batch)


def inputs(samples: Sequence[Loaded]) -> list[Value] | Array:
    """Return what `Client.extract` takes for readable samples of one kind.

    Raises:
        SourceError: Arrays differ in shape or dtype.
    """
    values = [sample.value for sample in samples if sample.value is not None]
    if samples[0].is_image:
        return values
    arrays = [value for value in values if not isinstance(value, bytes)]
    forms = {(array.shape, str(array.dtype)) for array in arrays}
    if len(forms) > 1:
        found = ", ".join(f"{shape} {dtype}" for shape, dtype in sorted(forms))
        raise SourceError(f"the arrays of a batch must be alike, not {found}; use --batch 1")
    return np.stack(arrays)
