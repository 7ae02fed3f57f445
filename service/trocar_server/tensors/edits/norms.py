"""Norm limits."""

from dataclasses import dataclass
from enum import StrEnum, unique

import torch

from trocar_server.tensors.edits.base import Operation, require
from trocar_server.tensors.edits.part import Part
from trocar_server.tensors.edits.value_signature import ValueSignature


@unique
class NormScope(StrEnum):
    """The elements that one norm is taken over."""

    SAMPLE = "sample"
    """Each sample, dimension 0."""
    CHANNEL_VECTOR = "channel_vector"
    """Each vector of channels."""
    ALL = "all"
    """All of the part."""


@dataclass(frozen=True)
class Normalise(Operation):
    """Scales down to a limit on the Euclidean norm; `is_exact`: up, too."""

    name = "normalise"
    wide_copies = 4
    max_norm: float
    scope: NormScope = NormScope.SAMPLE
    is_exact: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.max_norm > 0, f"normalise: max_norm {self.max_norm}; it must be above 0")

    def check(self, part: ValueSignature) -> None:
        """Check that the dimensions of the scope exist."""
        if self.scope is NormScope.SAMPLE:
            part.need_samples()
        if self.scope is NormScope.CHANNEL_VECTOR:
            part.need_channels()

    def apply(self, part: Part) -> torch.Tensor:
        """Return x scaled so that its norms are at most, or exactly, the limit; computed in float64.

        A norm of 0 or NaN changes nothing. An infinite norm turns finite elements to 0, as
        `torch.nn.utils.clip_grad_norm_` does.
        """
        wide = part.value.to(part.wide_dtype)
        dims = self.mixed_dims(part.signature)
        # At zero the norm has no second derivative: there it is taken of ones, and nothing is scaled.
        is_zero = (wide == 0).all(dims, keepdim=True) if dims else wide == 0
        safe = torch.where(is_zero, 1, wide)
        norms = torch.linalg.vector_norm(safe, dim=dims, keepdim=True) if dims else safe.abs()
        is_scaled = ~is_zero & (norms > (0 if self.is_exact else self.max_norm))
        factor = torch.where(is_scaled, self.max_norm / torch.where(is_scaled, norms, 1), 1)
        return (wide * factor).to(part.value.dtype)

    def mixed_dims(self, part: ValueSignature) -> tuple[int, ...]:
        """See `Operation.mixed_dims`: those that a norm is taken over."""
        every = tuple(range(len(part.shape)))
        if self.scope is NormScope.ALL:
            return every
        if self.scope is NormScope.CHANNEL_VECTOR:
            return (part.need_channels(),)
        return tuple(dim for dim in every if dim != part.need_samples())


def squares(value: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Return sums of |x|^2 along dimensions, kept with size 1; without dimensions, of each element."""
    each = value.real.square() + value.imag.square() if value.is_complex() else value.square()
    return each.sum(dims, keepdim=True) if dims else each
