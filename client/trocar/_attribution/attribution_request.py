"""Attribution request: inputs, an objective, and their split into batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trocar._attribution import attribution_objectives
from trocar._base.tensors import usual_channel_dim
from trocar._request.taps import Tap, tap

if TYPE_CHECKING:
    from trocar._attribution.scaling import Floats
    from trocar._base.tensors import Array
    from trocar._request.objectives import Objective


@dataclass(frozen=True)
class AttributionRequest:
    """One objective of one batch of inputs."""

    model_id: str
    """Who is asked."""
    inputs: Array
    """The model's input, (samples, ...)."""
    of: Objective
    """For this batch."""
    batch_size: int
    """The most samples in one pass of many."""
    name: str = ""
    """The parameter of the model's forward that gets the inputs; empty for the first."""

    @property
    def port(self) -> str:
        """The selector of the inputs."""
        return attribution_objectives.input_port(self.name)

    def given(self, values: Array) -> Array | dict[str, Array]:
        """Return values of the inputs' kind as a call takes them."""
        return {self.name: values} if self.name else values

    @property
    def samples(self) -> int:
        """Number of samples."""
        return len(self.inputs)

    def groups(self) -> Iterator[slice]:
        """Yield the samples of one pass; all of them if the objective is no sum over samples."""
        size = self.batch_size if attribution_objectives.is_sum_over_samples(self.of) else self.samples
        for start in range(0, self.samples, size):
            yield slice(start, min(start + size, self.samples))

    def copies_per_batch(self, copies: int, group: slice) -> int:
        """Return the number of copies of a group in one pass, split as evenly as possible."""
        if not attribution_objectives.is_sum_over_samples(self.of):
            return 1  # its value depends on the batch, which must stay as it is
        samples: int = group.stop - group.start
        most = max(1, self.batch_size // samples)
        batches = -(-copies // most)
        return -(-copies // batches)

    def objective(self, group: slice, copies: int) -> Objective:
        """Return the objective for a batch of copies of a group."""
        if group == slice(0, self.samples) and copies == 1:
            return self.of
        return attribution_objectives.for_samples(self.of, self._positions(group, copies), self.samples)

    def score_taps(self) -> list[Tap]:
        """Return the taps from which each sample's scores are computed; none if they cannot be."""
        selectors = attribution_objectives.score_selectors(self.of) or ()
        return [tap(selector) for selector in selectors]

    def scores(self, maps: Mapping[str, Array], group: slice | None = None, copies: int = 1) -> Floats | None:
        """Return the score of each sample of a batch of copies of a group; None if it cannot be computed."""
        selectors = attribution_objectives.score_selectors(self.of)
        if selectors is None:
            return None
        values = {selector: _classes_last(maps, selector) for selector in selectors}
        positions = self._positions(group or slice(0, self.samples), copies)
        return attribution_objectives.scores(self.of, values, positions, self.samples)

    def _positions(self, group: slice, copies: int) -> list[int]:
        return list(range(group.start, group.stop)) * copies


def one_value(maps: Mapping[str, Array], selector: str) -> Array:
    """Return the value of a selector of scores.

    Raises:
        ValueError: The selector stands for several values.
    """
    names = getattr(maps, "expansions", {}).get(selector, ())  # a mapping of arrays alone has none
    if len(names) > 1:
        shown = ", ".join(names)
        place = f"at='{names[0]}'" if '"' in names[0] else f'at="{names[0]}"'
        raise ValueError(
            f"'{selector}' stands for {len(names)} values: {shown}; choose the scores with of=, for example "
            f"trocar.logit(3, {place})"
        )
    return maps[selector]


def _classes_last(maps: Mapping[str, Array], name: str) -> Array:
    """Return a value with its classes in the last dimension, by what the reply says of its dimensions."""
    value = one_value(maps, name)
    described = getattr(maps, "info", {}).get(name)  # a mapping of arrays alone has none
    dim = None if described is None else described.channel_dim
    if dim is None:
        dim = min(usual_channel_dim(value.ndim), value.ndim - 1)
    return np.moveaxis(value, dim, -1)
