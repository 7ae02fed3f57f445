"""Rounding to a smaller dtype and back."""

import torch

from trocar_server.edits.operation import Cast
from trocar_server.edits.part import Part

_INT8_MAX = 127


def cast(part: Part, wanted: Cast) -> torch.Tensor:
    """Return x as the dtype would hold it: float16 and bfloat16 round to nearest, ties to even.

    int8: `round(x / scale) * scale`, ties to even, with one `scale = absmax / 127` of the finite elements;
    infinities become the largest finite element, NaN stays NaN. The gradient passes all of them as if
    nothing was rounded, as through `Tensor.to`.
    """
    if wanted.dtype == torch.int8:
        return _through_int8(part.value.to(part.compute_dtype)).to(part.value.dtype)
    if part.value.dtype == wanted.dtype:
        return part.value.clone()
    return part.value.to(wanted.dtype).to(part.value.dtype)


def _through_int8(value: torch.Tensor) -> torch.Tensor:
    absmax = torch.where(value.isfinite(), value, 0).detach().abs().amax()
    scale = absmax / _INT8_MAX
    # 0, also of a tiny absmax: nothing is divided then, and everything is rounded to 0.
    scale = torch.where(scale > 0, scale, 1)
    limited = torch.where(value.isinf(), value.sign() * absmax, value)
    rounded = (limited / scale).round() * scale
    # Exact: a value lies within a factor of 2 of what it was rounded to, or was rounded to 0.
    return limited + (rounded - limited).detach()
