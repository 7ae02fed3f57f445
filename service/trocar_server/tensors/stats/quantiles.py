"""Quantiles over all elements, per channel or per sample."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce

import torch

from trocar_server.tensors.stats import sketch
from trocar_server.tensors.stats.accumulator_state import Unpacked, damaged
from trocar_server.tensors.stats.groups import Grouped
from trocar_server.tensors.stats.sketch import BUFFERS, Buffer, Sketch
from trocar_server.tensors.stats.statistic import Scope, Statistic
from trocar_server.tensors.stats.topic import Topic

_MAX_LEVEL = 64
_HELD = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Quantiles:
    """The quantile sketch of every group."""

    sketch: Sketch
    """Sketch of the order of the elements."""

    shares: tuple[float, ...]
    """The requested quantiles."""

    def merge(self, other: "Quantiles") -> "Quantiles":
        """Merge with the sketch of the same groups over other elements.

        Raises:
            ServiceError: `REDUCTION_REJECTED`, there are too many groups to keep enough of each.
        """
        return Quantiles(self.sketch.merge(other.sketch), self.shares)

    def to(self, device: torch.device) -> "Quantiles":
        """Return this on `device`."""
        return Quantiles(self.sketch.to(device), self.shares)

    def finish(self, statistic: Statistic) -> torch.Tensor:
        """Return the quantiles, of shape (groups, shares)."""
        del statistic  # there is only one
        return self.sketch.quantiles(self.shares)

    @property
    def rank_error(self) -> float:
        """Bound on the rank error, as a share of the elements of a group."""
        return self.sketch.rank_error


@dataclass(frozen=True)
class SampleQuantiles:
    """The quantiles of every sample."""

    values: torch.Tensor
    """Of shape (samples, shares), float64."""

    rank_error: float
    """Bound on the rank error, as a share of the elements of a sample."""

    def concatenate(self, other: "SampleQuantiles") -> "SampleQuantiles":
        """Append the samples of `other`."""
        rank_error = max(self.rank_error, other.rank_error)
        return SampleQuantiles(torch.cat([self.values, other.values]), rank_error)

    def to(self, device: torch.device) -> "SampleQuantiles":
        """Return this on `device`."""
        return SampleQuantiles(self.values.to(device), self.rank_error)

    def finish(self, statistic: Statistic) -> torch.Tensor:
        """Return the quantiles, of shape (samples, shares)."""
        del statistic  # there is only one
        return self.values


def topic(scope: Scope, shares: tuple[float, ...]) -> Topic[Quantiles] | Topic[SampleQuantiles]:
    """Return the topic of these quantiles."""
    if scope is Scope.SAMPLE:
        return Topic(lambda grouped: _measure_samples(grouped, shares), SampleQuantiles.concatenate)

    def measure(grouped: Grouped) -> Quantiles:
        return Quantiles(sketch.measure(grouped.view, grouped.group_dim), shares)

    def unpack(state: Unpacked, groups: int, count: int) -> Quantiles:
        return Quantiles(_unpack(state, groups, count), shares)

    return Topic(measure, Quantiles.merge, _pack, unpack)


def _measure_samples(grouped: Grouped, shares: tuple[float, ...]) -> SampleQuantiles:
    """Compute the quantiles of each sample, as many samples at once as fit in memory."""
    view = grouped.view
    step = max(1, sketch.HELD_ELEMENTS * len(view) // max(view.numel(), 1))
    result = (sketch.measure(piece, 0) for piece in view.split(step))
    return reduce(
        SampleQuantiles.concatenate,
        (SampleQuantiles(accumulated.quantiles(shares), accumulated.rank_error) for accumulated in result),
    )


def _pack(accumulated: Quantiles) -> Mapping[str, torch.Tensor]:
    held = accumulated.sketch
    buffers = held.buffers
    return {
        "quantiles.raw": torch.cat(held.raw, dim=1)
        if held.raw
        else held.extremes.new_zeros(held.extremes.shape[1], 0),
        "quantiles.extremes": held.extremes,
        "quantiles.errors": torch.tensor([held.under, held.over]),
        "quantiles.weights": torch.tensor([buffer.weight for buffer in buffers], dtype=torch.int64),
        "quantiles.levels": torch.tensor([buffer.level for buffer in buffers], dtype=torch.int64),
        **{f"quantiles.buffer.{index}": buffer.values for index, buffer in enumerate(buffers)},
    }


def _unpack(state: Unpacked, groups: int, count: int) -> Sketch:
    extremes = state.tensor("quantiles.extremes", (2, groups), torch.float64)
    raw = state.tensor("quantiles.raw", (groups, None), *_HELD)
    under, over = state.integers("quantiles.errors", 2, 0, max(count, 1))
    weights = state.integers("quantiles.weights", None, 1, max(count, 1))
    levels = state.integers("quantiles.levels", len(weights), 1, _MAX_LEVEL)
    accumulated = Sketch((raw,) if raw.shape[1] else (), (), extremes, count, under, over)
    size = accumulated.buffer_size
    held = raw.shape[1] + size * len(weights)
    if len(weights) > BUFFERS or held > accumulated.capacity or (weights and not size):
        raise damaged("it has too many elements")
    if raw.shape[1] + size * sum(weights) != count:
        raise damaged("its quantiles count another number of elements")
    values = [state.tensor(f"quantiles.buffer.{i}", (groups, size), *_HELD) for i in range(len(weights))]
    return Sketch(accumulated.raw, tuple(map(Buffer, values, weights, levels)), extremes, count, under, over)
