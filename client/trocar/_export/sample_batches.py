"""Sample batches: samples stacked into the input of one pass."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from trocar._base.names import few
from trocar._export.decoding import Loaded, Value
from trocar._request.inputs import Inputs
from trocar._request.nested_inputs import stacked
from trocar._request.texts import Audio, Texts, joined_texts
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


def cut(
    samples: Iterable[Loaded], size: int, kind_of: Callable[[Loaded], object] | None = None
) -> Iterator[Batch]:
    """Split samples into batches of at most `size`, in order; each of samples of one kind.

    A batch depends only on the samples from its own first one on: splitting may begin at any batch.

    Args:
        samples: The samples.
        size: The most of one batch.
        kind_of: Returns the kind of a readable sample; `Loaded.kind` when None.
    """
    batch: list[Loaded] = []
    kind: object = None
    for sample in samples:
        if sample.error is None:
            own = sample.kind if kind_of is None else kind_of(sample)
            if kind not in (None, own):
                yield Batch(batch)
                batch = []
            kind = own
        batch.append(sample)
        if len(batch) == size:
            yield Batch(batch)
            batch, kind = [], None
    if batch:
        yield Batch(batch)


def inputs(samples: Sequence[Loaded]) -> Inputs:
    """Return the inputs of `Client.extract` for readable samples of one kind.

    Arrays of different sizes stay a list: some models take one, for others the server returns an error.

    Raises:
        SourceError: Arrays differ in rank or dtype; those of dictionaries in shape.
    """
    values = [sample.value for sample in samples if sample.value is not None]
    if samples[0].is_image:
        return cast("Inputs", values)
    if isinstance(values[0], Mapping):
        return _stacked(values)
    if isinstance(values[0], Texts):
        return joined_texts([value for value in values if isinstance(value, Texts)])
    if isinstance(values[0], Audio):
        return Audio(tuple(clip for value in values if isinstance(value, Audio) for clip in value.clips))
    arrays = [value for value in values if isinstance(value, np.ndarray)]
    if len({(array.ndim, str(array.dtype)) for array in arrays}) > 1:
        result = few(list(dict.fromkeys(f"{array.shape} {array.dtype}" for array in arrays)))
        raise SourceError(f"the arrays of a batch must have one shape and dtype, not {result}; use --batch 1")
    return np.stack(arrays) if len({array.shape for array in arrays}) == 1 else arrays


def _stacked(values: Sequence[Value]) -> Inputs:
    try:
        result: Inputs = stacked(values)
    except ValueError as error:
        raise SourceError(
            f"the dictionaries of a batch hold different arrays: {error}; use --batch 1"
        ) from None
    return result
