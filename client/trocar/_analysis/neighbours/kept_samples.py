"""Kept samples: names and inputs of samples while a running result still has them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from trocar._analysis.analysis_inputs import Samples
from trocar._analysis.sample_inputs import sample_input
from trocar._request.nested_inputs import copied


class KeptSamples:
    """Facts of wanted samples by their place in the data set; the others are forgotten batch by batch."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        """The file, text or number of each wanted sample."""
        self.inputs: dict[int, Any] = {}
        """The inputs of the shown ones."""

    def update(
        self,
        wanted: Collection[int],
        shown: Collection[int],
        first: int,
        name: Callable[[int], str],
        take: Callable[[int], Any],
    ) -> None:
        """Remember samples of the last batch, and forget what is not wanted any more.

        Args:
            wanted: Places of samples whose names are kept.
            shown: Places of samples whose inputs are kept, for pictures.
            first: The place of the batch's first sample.
            name: Names a sample by its position in the batch; empty where it has no name.
            take: Returns the input of a sample of the batch.
        """
        self.names = {
            index: self.names[index] if index < first else name(index - first) or f"sample {index}"
            for index in wanted
        }
        self.inputs = {
            index: self.inputs.get(index) if index < first else copied(take(index - first)) for index in shown
        }


class TakenSamples(Mapping[int, Any]):
    """Inputs of finite samples, taken when they are asked for.

    Args:
        samples: The samples, which can be taken again.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._samples.count:
            raise KeyError(index)
        return sample_input(self._samples.take(index, index + 1), 0)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._samples.count))

    def __len__(self) -> int:
        return self._samples.count
