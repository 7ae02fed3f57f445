"""Casts of values, with the measured error.

Note: [Dequantising int8]
    A scale is the float32 nearest to absmax / 127. The client computes int8 * scale in float32. The product
    of an int8 and a float32 is exact in float64, so float32 rounds it once, and every client gets the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from trocar_server.tensors.reductions.casts import Cast, check_cast
from trocar_server.tensors.reductions.reduction_stage import rejected

BLOCK_ELEMENTS = 1 << 20
"""The most elements that are compared in float64 at once: 8 MiB."""

_INT8_MAX = 127


@dataclass(frozen=True)
class CastValue:
    """A cast value.

    Attributes:
        value: The tensor to send.
        original_dtype: Dtype before the cast.
        scales: Of int8: value = scale * sent; one, or one per channel. Empty otherwise.
        channel_dim: The dimension of the scales, from 0, where there is one per channel.
        max_error: The largest absolute difference between any finite value and the value that the client
        decodes; infinite where a value was too large for float16.
    """

    value: torch.Tensor
    original_dtype: torch.dtype
    scales: list[float] = field(default_factory=list)
    channel_dim: int | None = None
    max_error: float = 0.0


def cast_value(value: torch.Tensor, cast: Cast, channel_dim: int | None = None) -> CastValue:
    """Cast a value and measure the error.

        cast_value(feature_map, Cast(torch.int8, is_per_channel=True), channel_dim=1).max_error

    float16 and bfloat16 round to nearest, ties to even; NaN and Inf stay. int8 is symmetric:
    `round(x / scale)` with `scale = absmax / 127`, and 0 where all is 0.

    Args:
        value: A dense tensor of floats.
        cast: The target of the cast.
        channel_dim: The value's channel dimension from 0, as in `Reduced.channel_dim`; None for none.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, the value does not fit the cast; int8 has no NaN and no Inf.
    """
    check_cast(value, cast, channel_dim)
    if cast.dtype is torch.int8:
        wide = value.float() if cast.widens(value.dtype) else value
        quantized = _to_int8(wide, cast, channel_dim if cast.is_per_channel else None)
        return replace(quantized, original_dtype=value.dtype)
    sent = value.to(cast.dtype)
    worst = value.new_zeros((), dtype=torch.float64)
    for block in _blocks(value.shape):
        worst = torch.maximum(worst, _worst_error(value[block].double(), sent[block]))
    return CastValue(sent, value.dtype, max_error=worst.item())


def _to_int8(value: torch.Tensor, cast: Cast, channel_dim: int | None) -> CastValue:
    scales = _scales(value, cast, channel_dim)
    shape = [size if dim == channel_dim else 1 for dim, size in enumerate(value.shape)]
    everywhere = scales.reshape(shape).expand(value.shape)
    sent = torch.empty(value.shape, dtype=torch.int8, device=value.device)
    worst = value.new_zeros((), dtype=torch.float64)
    for block in _blocks(value.shape):
        exact, scale = value[block].double(), everywhere[block]
        # A scale of 0 gives 0 / 0 or, where a tiny absmax / 127 underflows, x / 0: both are sent as 0.
        steps = torch.where(scale == 0, 0, (exact / scale).round().clamp(-_INT8_MAX, _INT8_MAX))
        sent[block] = steps.to(torch.int8)
        worst = torch.maximum(worst, _worst_error(exact, steps.float() * scale))
    return CastValue(sent, value.dtype, scales.double().tolist(), channel_dim, worst.item())


def _scales(value: torch.Tensor, cast: Cast, channel_dim: int | None) -> torch.Tensor:
    """Return one scale for all or one per channel, of shape (1,) or (channels,), float32."""
    absmax = _absmax(value, channel_dim)
    if not absmax.isfinite().all():
        nans, infinities = _nonfinite_counts(value)
        problem = f"int8 cannot hold the {nans:,} NaN and {infinities:,} Inf of the value; cast to bfloat16"
        raise rejected(value, cast, problem)
    if (absmax > torch.finfo(torch.float32).max).any():
        raise rejected(
            value, cast, "the client makes float32 of int8, and some are beyond it; leave the cast out"
        )
    scales = (absmax / _INT8_MAX).float()
    # Rounded up, the largest scale times 127 would be Inf.
    is_over = (scales * _INT8_MAX).isinf()
    return torch.where(is_over, scales.nextafter(torch.zeros_like(scales)), scales)


def _absmax(value: torch.Tensor, channel_dim: int | None) -> torch.Tensor:
    """Return the largest absolute value, of all or by channel, float64; NaN and Inf propagate."""
    groups = 1 if channel_dim is None else value.shape[channel_dim]
    absmax = torch.zeros(groups, dtype=torch.float64, device=value.device)
    for block in _blocks(value.shape):
        sizes = value[block].abs()
        own = block[channel_dim] if channel_dim is not None and channel_dim < len(block) else slice(None)
        grouped = (
            sizes.reshape(1, -1)
            if channel_dim is None
            else sizes.movedim(channel_dim, 0).reshape(len(absmax[own]), -1)
        )
        absmax[own] = torch.maximum(absmax[own], grouped.amax(1).double())
    return absmax


def _nonfinite_counts(value: torch.Tensor) -> tuple[int, int]:
    """Count NaN and Inf."""
    blocks = [value[block] for block in _blocks(value.shape)]
    nans, infinities = (
        sum(int(is_one(part).sum()) for part in blocks) for is_one in (torch.isnan, torch.isinf)
    )
    return nans, infinities


def _worst_error(exact: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    """Return the largest absolute difference where the exact value, float64, is finite."""
    return torch.where(exact.isfinite(), (exact - sent.double()).abs(), 0).amax()


def _blocks(shape: torch.Size, before: tuple[slice, ...] = ()) -> Iterator[tuple[slice, ...]]:
    """Yield slices that partition a tensor into parts of at most `BLOCK_ELEMENTS` elements, none if empty.

    Splits the first dimension that must be split, so that parts are views.
    """
    if not shape.numel():
        return
    if shape.numel() <= BLOCK_ELEMENTS:
        yield before
        return
    rest = shape[1:]
    rows = max(1, BLOCK_ELEMENTS // rest.numel())
    for first in range(0, shape[0], rows):
        own = (*before, slice(first, min(first + rows, shape[0])))
        yield from _blocks(rest, own) if rows == 1 else [own]
