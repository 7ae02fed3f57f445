"""Summary: the parts that the requested statistics need, for every group of a tensor."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial, reduce

import torch

from trocar_server.tensors.stats import moments, spread
from trocar_server.tensors.stats.accumulator_state import Unpacked, damaged
from trocar_server.tensors.stats.groups import BLOCK_ELEMENTS, Grouped
from trocar_server.tensors.stats.parts import Part
from trocar_server.tensors.stats.statistic import Scope, Statistic
from trocar_server.tensors.stats.topic import Topic

_MEASURED_AS_THEY_ARE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""The dtypes for which every part with `takes_floats` has kernels; float8 has few of them (torch 2.14)."""
_DEVICE_BLOCKS = 8
"""Away from the CPU blocks are so many times larger, for fewer launches."""


@dataclass(frozen=True)
class Summary:
    """The parts of every group."""

    count: torch.Tensor
    """Elements in each group, of shape (groups,), float64."""

    parts: dict[Part, torch.Tensor]
    """Each of shape (rows, groups), float64."""

    def merge(self, other: "Summary") -> "Summary":
        """Merge with the parts of the same groups over other elements."""
        parts = {part: part.merge(value, other.parts[part]) for part, value in self.parts.items()}
        return Summary(self.count + other.count, parts)

    def concatenate(self, other: "Summary") -> "Summary":
        """Append the groups of `other`."""
        parts = {part: torch.cat([value, other.parts[part]], dim=1) for part, value in self.parts.items()}
        return Summary(torch.cat([self.count, other.count]), parts)

    def to(self, device: torch.device) -> "Summary":
        """Return this summary on `device`."""
        return Summary(self.count.to(device), {part: value.to(device) for part, value in self.parts.items()})

    def finish(self, statistic: Statistic) -> torch.Tensor:
        """Compute a statistic from the parts, of shape (groups,)."""
        return _FORMULAS[statistic].finish(self)

    def _extreme(self, part: Part) -> torch.Tensor:
        return torch.where(self.count == 0, torch.nan, self.parts[part][0])


@dataclass(frozen=True)
class _Formula:
    needs: tuple[Part, ...]
    finish: Callable[[Summary], torch.Tensor]


_FORMULAS: dict[Statistic, _Formula] = {
    Statistic.MEAN: _Formula((Part.TOTAL,), lambda s: s.parts[Part.TOTAL][0] / s.count),
    Statistic.VAR: _Formula((Part.SPREAD,), lambda s: spread.variance(s.parts[Part.SPREAD])),
    Statistic.STD: _Formula((Part.SPREAD,), lambda s: spread.variance(s.parts[Part.SPREAD]).sqrt()),
    Statistic.MIN: _Formula((Part.LOW,), lambda s: s._extreme(Part.LOW)),
    Statistic.MAX: _Formula((Part.HIGH,), lambda s: s._extreme(Part.HIGH)),
    Statistic.ABSMAX: _Formula(
        (Part.LOW, Part.HIGH),
        lambda s: torch.maximum(-s._extreme(Part.LOW), s._extreme(Part.HIGH)) + 0.0,  # -0 becomes 0
    ),
    Statistic.L2: _Formula((Part.SQUARES,), lambda s: s.parts[Part.SQUARES][0].sqrt()),
    Statistic.ZERO_FRACTION: _Formula((Part.ZEROS,), lambda s: s.parts[Part.ZEROS][0] / s.count),
    Statistic.NAN_COUNT: _Formula((Part.NANS,), lambda s: s.parts[Part.NANS][0]),
    Statistic.L1: _Formula((Part.ABSOLUTES,), lambda s: s.parts[Part.ABSOLUTES][0]),
    Statistic.SKEWNESS: _Formula((Part.MOMENTS,), lambda s: moments.skewness(s.parts[Part.MOMENTS])),
    Statistic.KURTOSIS: _Formula((Part.MOMENTS,), lambda s: moments.kurtosis(s.parts[Part.MOMENTS])),
    Statistic.COUNT: _Formula((), lambda s: s.count),
    Statistic.INF_COUNT: _Formula((Part.INFS,), lambda s: s.parts[Part.INFS][0]),
}


def needed_parts(statistics: Iterable[Statistic]) -> tuple[Part, ...]:
    """Return the parts that these statistics need, each once."""
    return tuple(
        dict.fromkeys(
            part for statistic in statistics if statistic in _FORMULAS for part in _FORMULAS[statistic].needs
        )
    )


def topic(scope: Scope, parts: tuple[Part, ...]) -> Topic[Summary]:
    """Return the topic of these parts."""

    def measure(grouped: Grouped) -> Summary:
        return summarize(grouped.view, grouped.group_dim, parts)

    combine = Summary.concatenate if scope is Scope.SAMPLE else Summary.merge
    return Topic(measure, combine, _pack, partial(_unpack, parts))


def summarize(
    value: torch.Tensor, group_dim: int, parts: tuple[Part, ...], block_elements: int = BLOCK_ELEMENTS
) -> Summary:
    """Summarise a real tensor of at least two dimensions, block by block.

    Splits the first dimension that can be split, so that blocks are views and no more than
    `block_elements` are ever copied to float64 together. A count alone reads no element.

    Away from the CPU each operation costs a launch, and no block stays in a cache: there the parts that need
    no copy are measured of the whole tensor at once.
    """
    if not parts:
        return Summary(_counts(value, group_dim), {})
    if value.device.type != "cpu" and value.dtype in _MEASURED_AS_THEY_ARE:
        at_once = {part: part.measure(value, group_dim) for part in parts if part.value.takes_floats}
        others = tuple(part for part in parts if part not in at_once)
        rest = _in_blocks(value, group_dim, others, _DEVICE_BLOCKS * block_elements) if others else None
        return Summary(_counts(value, group_dim), {**at_once, **(rest.parts if rest else {})})
    return _in_blocks(value, group_dim, parts, block_elements)


def _in_blocks(value: torch.Tensor, group_dim: int, parts: tuple[Part, ...], block_elements: int) -> Summary:
    if value.numel() <= block_elements:
        return _measure(value.to(torch.float64), group_dim, parts)
    dim = next(dim for dim, size in enumerate(value.shape) if size > 1)
    rows = max(1, block_elements * value.shape[dim] // value.numel())
    summaries = (_in_blocks(piece, group_dim, parts, block_elements) for piece in value.split(rows, dim))
    return reduce(Summary.concatenate if dim == group_dim else Summary.merge, summaries)


def _measure(block: torch.Tensor, group_dim: int, parts: tuple[Part, ...]) -> Summary:
    return Summary(_counts(block, group_dim), {part: part.measure(block, group_dim) for part in parts})


def _counts(value: torch.Tensor, group_dim: int) -> torch.Tensor:
    groups = value.shape[group_dim]
    return value.new_full((groups,), value.numel() / max(groups, 1), dtype=torch.float64)


def _pack(accumulated: Summary) -> Mapping[str, torch.Tensor]:
    return {f"part.{part.name}": value for part, value in accumulated.parts.items()}


def _unpack(parts: tuple[Part, ...], state: Unpacked, groups: int, count: int) -> Summary:
    values = {
        part: state.tensor(f"part.{part.name}", (part.value.rows, groups), torch.float64) for part in parts
    }
    counts = torch.full((groups,), count, dtype=torch.float64)
    for part, value in values.items():
        if not part.is_possible(value, counts):
            raise damaged(f"its {part.name.lower()} is impossible")
    return Summary(counts, values)
