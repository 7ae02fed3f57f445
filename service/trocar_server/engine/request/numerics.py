"""Numerics: how close results must be to eager PyTorch, and the check."""

from collections.abc import Mapping
from enum import StrEnum, unique

import torch

from trocar_server.tensors.bits import same_bits


@unique
class Numerics(StrEnum):
    """Numerics that a caller accepts, and that a pass has; from the strictest to the loosest."""

    EXACT = "exact"
    """Bit-equal to eager PyTorch for the same batch."""
    FAST = "fast"
    """float32 with sums in another order: a relative error of at most 1e-5."""
    BF16 = "bf16"
    """Computed in bfloat16: a cosine of at least 0.9999."""


MAX_RELATIVE_ERROR = 1e-5
"""Of `FAST`: the norm of the difference over the norm of the value, for each feature map."""

MIN_COSINE = 0.9999
"""Of `BF16`: between a feature map and the eager one, both flattened."""

_MARGIN = 1.25
"""A backend must be better by this factor on the trial batch: other batches differ a little."""


def deviation(numerics: Numerics, expected: torch.Tensor, result: torch.Tensor) -> float:
    """Return the deviation from the expected values, as a share of the promised maximum: 1 is just kept.

    Exact values must have the same bits. In others NaN, infinity and its negative must each be in the same
    places. Calls torch: owner thread only.

    Args:
        numerics: The promise.
        expected: The eager value.
        result: Another backend's value. Another shape or dtype counts as infinitely far.
    """
    if expected.shape != result.shape or expected.dtype != result.dtype:
        return float("inf")
    if numerics is Numerics.EXACT or not expected.is_floating_point():
        return 0.0 if same_bits(expected, result) else float("inf")
    finite = torch.isfinite(expected)
    if not torch.equal(finite, torch.isfinite(result)):
        return float("inf")
    if not finite.all():
        if not torch.equal(*(value[~finite].nan_to_num(0.0, 1.0, -1.0) for value in (expected, result))):
            return float("inf")
        expected, result = expected[finite], result[finite]
    return _of_finite(numerics, expected.double().flatten(), result.double().flatten())


def _of_finite(numerics: Numerics, expected: torch.Tensor, result: torch.Tensor) -> float:
    size = float(expected.norm())
    if size == 0.0:
        return 0.0 if not result.any() else float("inf")
    if numerics is Numerics.FAST:
        return float((expected - result).norm()) / size / MAX_RELATIVE_ERROR
    cosine = float(expected @ result) / (size * max(float(result.norm()), torch.finfo(torch.float64).tiny))
    return max(0.0, 1.0 - cosine) / (1.0 - MIN_COSINE)


def worst_deviation(
    numerics: Numerics, expected: Mapping[str, torch.Tensor], result: Mapping[str, torch.Tensor]
) -> float:
    """Return the largest deviation of any value; infinite when names differ."""
    if expected.keys() != result.keys():
        return float("inf")
    return max((deviation(numerics, expected[name], result[name]) for name in expected), default=0.0)


def keeps_promise(share: float) -> bool:
    """Whether a deviation on one batch is small enough to expect the promise of other batches."""
    return share * _MARGIN <= 1.0
