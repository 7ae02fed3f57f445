"""Sample batches: samples stacked into the input of one pass."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trocar._base.names import few
from trocar._base.tensors import Array
from trocar._export.decoding import Loaded, Value
from trocar._transport.rpc_errors import image_of
from trocar.errors import SourceError


@dataclass(frozen=True)
class Batch:
    """Consecutive samples of the source."""

    samples: Sequence[Loaded]
    """At least one; unreadable ones included."""

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
        """Name the batch, and its sample if the error has one."""
        at = image_of(error)
        readable = self.readable
        if at is None or at >= len(readable) or len(self.samples) == 1:
            return self.name
        return f"{self.name}; image {at} is {readable[at].key}"


def cut(samples: Iterable[Loaded], size: int) -> Iterator[Batch]:
    """Split samples into batches of at most `size`, in order; images and arrays separately.

    A batch depends only on the samples from its own first one on: splitting may begin at any batch.
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


def inputs(samples: Sequence[Loaded]) -> list[Value] | list[Array] | Array:
    """Return the inputs of `Client.extract` for readable samples of one kind.

    Arrays of different sizes stay a list: some models take one, for others the server returns an error.

    Raises:
        SourceError: Arrays differ in rank or dtype.
    """
    values = [sample.value for sample in samples if sample.value is not None]
    if samples[0].is_image:
        return values
    arrays = [value for value in values if not isinstance(value, bytes)]
    if len({(array.ndim, str(array.dtype)) for array in arrays}) > 1:
        found = few(list(dict.fromkeys(f"{array.shape} {array.dtype}" for array in arrays)))
        raise SourceError(f"the arrays of a batch must have one shape and dtype, not {found}; use --batch 1")
    return np.stack(arrays) if len({array.shape for array in arrays}) == 1 else arrays
