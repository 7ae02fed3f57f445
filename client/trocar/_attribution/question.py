"""What is asked of a model: inputs, an objective, and how both are cut into batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trocar._attribution import objectives
from trocar._taps import Tap, tap

if TYPE_CHECKING:
    from trocar._attribution.scaling import Floats
    from trocar._objectives import Objective
    from trocar._tensors import Array


@dataclass(frozen=True)
class Question:
    """One objective of one batch of inputs."""

    model_id: str
    """Who is asked."""
    inputs: Array
    """The model's input, (samples, ...)."""
    of: Objective
    """For this batch."""
    batch_size: int
    """The most samples in one pass of many."""

    @property
    def samples(self) -> int:
        """How many there are."""
        return len(self.inputs)

    def groups(self) -> Iterator[slice]:
        """Yield the samples that go into one pass; all of them where the objective is no sum over samples."""
        size = self.batch_size if objectives.is_sum_over_samples(self.of) else self.samples
        for start in range(0, self.samples, size):
            yield slice(start, min(start + size, self.samples))

    def copies_per_batch(self, copies: int, group: slice) -> int:
        """Return how many copies of a group go into one pass, as evenly as possible."""
        if not objectives.is_sum_over_samples(self.of):
            return 1  # its value depends on the batch, which must stay as it is
        samples: int = group.stop - group.start
        most = max(1, self.batch_size // samples)
        batches = -(-copies // most)
        return -(-copies // batches)

    def objective(self, group: slice, copies: int) -> Objective:
        """Return the objective for a batch of copies of a group."""
        if group == slice(0, self.samples) and copies == 1:
            return self.of
        return objectives.for_samples(self.of, self._positions(group, copies), self.samples)

    def score_taps(self) -> list[Tap]:
        """Return where the scores of each sample are computed from; none where they cannot be."""
        selectors = objectives.score_selectors(self.of) or ()
        return [tap(selector, alias=_alias(index)) for index, selector in enumerate(selectors)]

    def scores(self, maps: Mapping[str, Array], group: slice | None = None, copies: int = 1) -> Floats | None:
        """Return the score of each sample of a batch of copies of a group; None where it cannot be."""
        selectors = objectives.score_selectors(self.of)
        if selectors is None:
            return None
        values = {selector: maps[_alias(index)] for index, selector in enumerate(selectors)}
        positions = self._positions(group or slice(0, self.samples), copies)
        return objectives.scores(self.of, values, positions, self.samples)

    def _positions(self, group: slice, copies: int) -> list[int]:
        return list(range(group.start, group.stop)) * copies


def _alias(index: int) -> str:
    return f"score{index}"
