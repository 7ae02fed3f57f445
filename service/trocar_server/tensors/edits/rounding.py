"""Rounding to a smaller dtype and back."""

from dataclasses import dataclass

import torch

from trocar_server.tensors.edits.base import Operation, require
from trocar_server.tensors.edits.part import Part
from trocar_server.tensors.edits.value_signature import ValueSignature

_INT8_MAX = 127


@dataclass(frozen=True)
class Cast(Operation):
    """To a dtype and back: float16, bfloat16, or int8 with one scale for the part."""

    name = "cast"
    takes_complex = False
    wide_copies = 5
    dtype: torch.dtype

    def __post_init__(self) -> None:
        allowed = (torch.float16, torch.bfloat16, torch.int8)
        require(self.dtype in allowed, "cast: to float16, bfloat16 or int8")

    def mixed_dims(self, part: ValueSignature) -> tuple[int, ...]:
        """See `Operation.mixed_dims`: int8 has one scale for all."""
        return tuple(range(len(part.shape))) if self.dtype == torch.int8 else ()

    def apply(self, part: Part) -> torch.Tensor:
        """Return x rounded to the dtype: float16 and bfloat16 round to nearest, ties to even.

        int8: `round(x / scale) * scale`, ties to even, with one `scale = absmax / 127` of the finite
        elements; infinities become the largest finite element, NaN stays NaN. The gradient ignores the
        rounding, as through `Tensor.to`.
        """
        value = part.value
        if self.dtype == torch.int8:
            return _through_int8(value.to(part.compute_dtype)).to(value.dtype)
        return value.clone() if value.dtype == self.dtype else value.to(self.dtype).to(value.dtype)


def _through_int8(value: torch.Tensor) -> torch.Tensor:
    absmax = torch.where(value.isfinite(), value, 0).detach().abs().amax()
    scale = absmax / _INT8_MAX
    # 0, also for a tiny absmax: nothing is divided then, and everything is rounded to 0.
    scale = torch.where(scale > 0, scale, 1)
    # Rounded up, the largest scale times 127 would be Inf.
    is_over = (scale * _INT8_MAX).isinf()
    scale = torch.where(is_over, scale.nextafter(torch.zeros_like(scale)), scale)
    limited = torch.where(value.isinf(), value.sign() * absmax, value)
    rounded = (limited / scale).round() * scale
    # Exact: a value is within a factor of 2 of its rounding, or was rounded to 0.
    return limited + (rounded - limited).detach()
