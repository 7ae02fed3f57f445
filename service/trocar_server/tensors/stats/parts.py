"""Parts: sufficient statistics of a tensor that merge over blocks and batches.

A part is a float64 tensor of shape (rows, groups), on the device of the measured tensor. Only the parts that
the requested statistics need are computed: a mean costs one sum and no second pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from trocar_server.tensors.stats import moments, spread

Measure = Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]
Merge = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Rule:
    """The computation of one part."""

    measure: Measure
    """Takes a non-empty float64 block and the dimensions to reduce."""

    merge: Merge = torch.add
    """Takes the parts of the same groups from two sets of elements."""

    of_nothing: float = 0.0
    """The part of an empty set, the neutral element of `merge`."""

    rows: int = 1
    """Numbers per group."""

    is_count: bool = False
    """Whether it is a count of elements."""

    takes_floats: bool = False
    """Whether it also measures a block of float16, bfloat16 and float32, without a copy in float64."""


class Part(Enum):
    """One sufficient statistic of every group."""

    TOTAL = Rule(lambda block, dims: block.sum(dims, dtype=torch.float64), takes_floats=True)
    """Plain sum, so that Inf and NaN propagate over merges as within one tensor."""
    ABSOLUTES = Rule(lambda block, dims: block.abs().sum(dims))
    SQUARES = Rule(lambda block, dims: block.square().sum(dims))
    ZEROS = Rule(lambda block, dims: (block == 0).sum(dims), is_count=True, takes_floats=True)
    NANS = Rule(lambda block, dims: block.isnan().sum(dims), is_count=True, takes_floats=True)
    INFS = Rule(lambda block, dims: block.isinf().sum(dims), is_count=True, takes_floats=True)
    LOW = Rule(lambda block, dims: block.amin(dims), torch.minimum, of_nothing=torch.inf, takes_floats=True)
    HIGH = Rule(lambda block, dims: block.amax(dims), torch.maximum, of_nothing=-torch.inf, takes_floats=True)
    SPREAD = Rule(spread.measure, spread.merge, rows=4)
    MOMENTS = Rule(moments.measure, moments.merge, rows=6)

    def measure(self, block: torch.Tensor, group_dim: int) -> torch.Tensor:
        """Return this part of every group of a float64 block; of other floats where `takes_floats`."""
        rule, groups = self.value, block.shape[group_dim]
        if block.numel() == 0:
            return block.new_full((rule.rows, groups), rule.of_nothing, dtype=torch.float64)
        dims = tuple(dim for dim in range(block.ndim) if dim != group_dim)
        return rule.measure(block, dims).to(torch.float64).reshape(rule.rows, groups)

    def merge(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return this part of the elements of both."""
        return self.value.merge(left, right)

    def is_possible(self, value: torch.Tensor, count: torch.Tensor) -> bool:
        """Whether this part is possible for groups with this many elements; validates untrusted states."""
        if self.value.is_count:
            return bool(((value >= 0) & (value <= count) & (value == value.floor())).all())
        if self.value.rows > 1:  # count, centre, correction, squares and perhaps more
            return bool((value[0] == count).all() and value[2].isfinite().all() and not (value[3] < 0).any())
        return True
