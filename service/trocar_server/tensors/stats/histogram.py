"""Histograms, with given edges or with adaptive bins."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce

import torch

from trocar_server.tensors.stats.accumulator_state import MAX_COUNT, Unpacked, damaged
from trocar_server.tensors.stats.grid import HIGHEST_EXPONENT, LOWEST_EXPONENT, Grid, fit
from trocar_server.tensors.stats.groups import Grouped, row_blocks
from trocar_server.tensors.stats.statistic import Scope, Statistic, StatisticParameters
from trocar_server.tensors.stats.topic import Topic


@dataclass(frozen=True)
class Histogram:
    """Counts of the bins of every group; the bins are the same for all."""

    counts: torch.Tensor
    """Of shape (groups, bins), int64."""

    edges: tuple[float, ...]
    """One more than bins."""

    def merge(self, other: "Histogram") -> "Histogram":
        """Merge with the counts of the same groups over other elements."""
        return Histogram(self.counts + other.counts, self.edges)

    def concatenate(self, other: "Histogram") -> "Histogram":
        """Append the groups of `other`."""
        return Histogram(torch.cat([self.counts, other.counts]), self.edges)

    def to(self, device: torch.device) -> "Histogram":
        """Return this on `device`."""
        return Histogram(self.counts.to(device), self.edges)

    def finish(self, statistic: Statistic) -> torch.Tensor:
        """Return the counts, of shape (groups, bins), float64."""
        del statistic  # there is only one
        return self.counts.to(torch.float64)


@dataclass(frozen=True)
class GridHistogram:
    """Counts of adaptive bins; see Note: [Mergeable grids] in `grid`."""

    counts: torch.Tensor
    """Of shape (groups, bins), int64; no bins where there was no finite element."""

    grid: Grid | None
    """The bins; None for none."""

    bin_count: int
    """The most bins."""

    def merge(self, other: "GridHistogram") -> "GridHistogram":
        """Merge with the counts of the same groups over other elements."""
        grid = self._common_grid(other)
        return GridHistogram(self._on(grid) + other._on(grid), grid, self.bin_count)

    def concatenate(self, other: "GridHistogram") -> "GridHistogram":
        """Append the groups of `other`."""
        grid = self._common_grid(other)
        return GridHistogram(torch.cat([self._on(grid), other._on(grid)]), grid, self.bin_count)

    def to(self, device: torch.device) -> "GridHistogram":
        """Return this on `device`."""
        return GridHistogram(self.counts.to(device), self.grid, self.bin_count)

    def finish(self, statistic: Statistic) -> torch.Tensor:
        """Return the counts, of shape (groups, bins), float64; one bin without elements."""
        del statistic  # there is only one
        is_one_bin = self.grid is None or self.bin_count == 1
        counts = self.counts.sum(1, keepdim=True) if is_one_bin else self.counts
        return counts.to(torch.float64)

    @property
    def edges(self) -> tuple[float, ...]:
        """One more than bins; 0 and 1 without elements, as in NumPy."""
        edges = (0.0, 1.0) if self.grid is None else self.grid.edges()
        return (edges[0], edges[-1]) if self.bin_count == 1 else edges

    def _common_grid(self, other: "GridHistogram") -> Grid | None:
        if self.grid is None or other.grid is None:
            return self.grid or other.grid
        return self.grid.union(other.grid, _grid_bins(self.bin_count))

    def _on(self, grid: Grid | None) -> torch.Tensor:
        if grid is None or self.grid == grid:
            return self.counts
        if self.grid is None:
            return self.counts.new_zeros(len(self.counts), grid.width)
        return self.grid.moved(self.counts, grid)


def topic(scope: Scope, parameters: StatisticParameters) -> Topic[Histogram] | Topic[GridHistogram]:
    """Return the topic of histograms with these parameters."""
    is_per_sample = scope is Scope.SAMPLE
    if parameters.edges:
        combine = Histogram.concatenate if is_per_sample else Histogram.merge
        return _EdgesTopic(parameters.edges).topic(combine)
    combine_grids = GridHistogram.concatenate if is_per_sample else GridHistogram.merge
    return _GridTopic(parameters.most_bins).topic(combine_grids)


@dataclass(frozen=True)
class _EdgesTopic:
    edges: tuple[float, ...]

    def topic(self, combine: Callable[[Histogram, Histogram], Histogram]) -> Topic[Histogram]:
        return Topic(
            self.measure, combine, lambda accumulated: {"histogram.counts": accumulated.counts}, self.unpack
        )

    def measure(self, grouped: Grouped) -> Histogram:
        edges = torch.tensor(self.edges, dtype=torch.float64, device=grouped.view.device)
        blocks = row_blocks(grouped.view, grouped.group_dim)
        return reduce(
            Histogram.merge, (self._measure_block(block.to(torch.float64), edges) for block in blocks)
        )

    def _measure_block(self, block: torch.Tensor, edges: torch.Tensor) -> Histogram:
        bins = len(edges) - 1
        position = torch.searchsorted(edges, block.contiguous(), right=True) - 1
        position = torch.where(block == edges[-1], bins - 1, position)
        is_inside = (block >= edges[0]) & (block <= edges[-1])
        return Histogram(_count(position, is_inside, bins), self.edges)

    def unpack(self, state: Unpacked, groups: int, count: int) -> Histogram:
        return Histogram(_unpack_counts(state, groups, count, len(self.edges) - 1), self.edges)


@dataclass(frozen=True)
class _GridTopic:
    bin_count: int

    def topic(self, combine: Callable[[GridHistogram, GridHistogram], GridHistogram]) -> Topic[GridHistogram]:
        return Topic(self.measure, combine, _pack_grid, self.unpack)

    def measure(self, grouped: Grouped) -> GridHistogram:
        blocks = row_blocks(grouped.view, grouped.group_dim)
        return reduce(GridHistogram.merge, (self._measure_block(block.to(torch.float64)) for block in blocks))

    def _measure_block(self, block: torch.Tensor) -> GridHistogram:
        is_finite = block.isfinite()
        low, high = _finite_range(block, is_finite)
        if low > high:
            return GridHistogram(block.new_zeros(len(block), 0, dtype=torch.int64), None, self.bin_count)
        grid = fit(low, high, _grid_bins(self.bin_count))
        position = grid.locate(torch.where(is_finite, block, low)).to(torch.int64)
        return GridHistogram(_count(position, is_finite, grid.width), grid, self.bin_count)

    def unpack(self, state: Unpacked, groups: int, count: int) -> GridHistogram:
        limits = (LOWEST_EXPONENT, HIGHEST_EXPONENT), (-MAX_COUNT, MAX_COUNT), (0, _grid_bins(self.bin_count))
        exponent, first, width = state.integers("histogram.grid", 3, -MAX_COUNT, MAX_COUNT)
        if not all(low <= n <= high for n, (low, high) in zip((exponent, first, width), limits, strict=True)):
            raise damaged("its histogram has impossible bins")
        counts = _unpack_counts(state, groups, count, width)
        return GridHistogram(counts, Grid(exponent, first, width) if width else None, self.bin_count)


def _grid_bins(bin_count: int) -> int:
    """Return the most bins of a grid: at least two, for elements on both sides of zero."""
    return max(bin_count, 2)


def _finite_range(block: torch.Tensor, is_finite: torch.Tensor) -> tuple[float, float]:
    """Return the smallest and the largest finite element; Inf and -Inf for none."""
    if block.numel() == 0:
        return torch.inf, -torch.inf
    low = torch.where(is_finite, block, torch.inf).amin()
    high = torch.where(is_finite, block, -torch.inf).amax()
    smallest, largest = torch.stack([low, high]).tolist()
    return smallest, largest


def _count(position: torch.Tensor, is_inside: torch.Tensor, bins: int) -> torch.Tensor:
    """Count positions of shape (groups, elements) where inside; returns (groups, bins), int64."""
    groups = len(position)
    position = torch.where(is_inside, position, bins)  # one more column, for uncounted elements
    offset = torch.arange(groups, device=position.device)[:, None] * (bins + 1)
    counts = torch.bincount((position + offset).reshape(-1), minlength=groups * (bins + 1))
    return counts.reshape(groups, bins + 1)[:, :bins]


def _pack_grid(accumulated: GridHistogram) -> Mapping[str, torch.Tensor]:
    grid = accumulated.grid or Grid(0, 0, 0)
    numbers = torch.tensor([grid.exponent, grid.first, grid.width])
    return {"histogram.counts": accumulated.counts, "histogram.grid": numbers}


def _unpack_counts(state: Unpacked, groups: int, count: int, bins: int) -> torch.Tensor:
    counts = state.tensor("histogram.counts", (groups, bins), torch.int64)
    if counts.numel() and (int(counts.min()) < 0 or int(counts.max()) > count):
        raise damaged("its histogram counts more elements than there are")
    if (counts.sum(1) > count).any():
        raise damaged("its histogram counts more elements than there are")
    return counts
