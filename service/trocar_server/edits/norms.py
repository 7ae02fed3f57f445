"""Limits on norms."""

import torch

from trocar_server.edits.operation import Normalise, NormScope
from trocar_server.edits.part import Part


def normalise(part: Part, wanted: Normalise) -> torch.Tensor:
    """Return x scaled so that its norms are at most, or exactly, the limit; computed in float64.

    A norm of 0 or NaN leaves all as it is; one of infinity makes 0 of what is finite, as
    `torch.nn.utils.clip_grad_norm_` does.
    """
    wide = part.value.to(part.wide_dtype)
    sums = squares(wide, _dims(part, wanted.scope))
    norms = sums.detach().sqrt()
    is_scaled = norms > (0 if wanted.is_exact else wanted.max_norm)
    # The root sees 1 where it does not count: its derivative at 0 is infinite, and 0 * inf is NaN.
    factor = torch.where(is_scaled, wanted.max_norm / torch.where(is_scaled, sums, 1).sqrt(), 1)
    return (wide * factor).to(part.value.dtype)


def squares(value: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Return sums of |x|^2 along dimensions, which stay with size 1; no dimension: of each element."""
    each = value.real.square() + value.imag.square() if value.is_complex() else value.square()
    return each.sum(dims, keepdim=True) if dims else each


def _dims(part: Part, scope: NormScope) -> tuple[int, ...]:
    every = tuple(range(part.value.ndim))
    if scope is NormScope.ALL:
        return every
    if scope is NormScope.CHANNEL_VECTOR:
        return (part.form.need_channels(),)
    return tuple(dim for dim in every if dim != part.form.need_samples())
