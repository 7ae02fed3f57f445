"""Cast targets of a value, and the signature after each cast."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.reductions.reduction import dtype_name
from trocar_server.tensors.reductions.reduction_stage import FLOAT8, FLOATS, rejected

_TARGETS = (torch.float16, torch.bfloat16, torch.int8)


@dataclass(frozen=True)
class Cast:
    """The target of a cast before transfer.

    Attributes:
        dtype: float16, bfloat16, or int8 with a scale.
        is_per_channel: int8 only: one scale per channel instead of one for all.
        only_float32: Whether values of other dtypes stay as they are.
    """

    dtype: torch.dtype
    is_per_channel: bool = False
    only_float32: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in _TARGETS:
            problem = f"a cast to {dtype_name(self.dtype)}; available: float16, bfloat16 and int8"
            raise ServiceError(ErrorReason.INVALID_ARGUMENT, problem)
        if self.is_per_channel and self.dtype is not torch.int8:
            problem = f"a cast to {dtype_name(self.dtype)} has no scales; only int8 can be per channel"
            raise ServiceError(ErrorReason.INVALID_ARGUMENT, problem)

    def applies_to(self, dtype: torch.dtype) -> bool:
        """Whether values of a dtype are cast, or refused; other values stay as they are."""
        return dtype is torch.float32 or not self.only_float32

    def widens(self, dtype: torch.dtype) -> bool:
        """Whether values of a dtype become float32 first: torch cannot compare floats of 8 bits."""
        return self.dtype is torch.int8 and dtype in FLOAT8

    def __str__(self) -> str:
        return f"cast to {dtype_name(self.dtype)}" + (" per channel" if self.is_per_channel else "")


@dataclass(frozen=True)
class CastSignature:
    """The signature of a value after a cast, with its memory.

    Attributes:
        dtype: The dtype to send.
        byte_count: Bytes of the values to send.
        scale_count: Number of scales sent with them: 0, 1 or one per channel.
        extra_bytes: Bytes in use besides the value while it is cast, the result included.
    """

    dtype: torch.dtype
    byte_count: int
    scale_count: int
    extra_bytes: int


def cast_signature(
    shape: Sequence[int], dtype: torch.dtype, cast: Cast, channel_dim: int | None
) -> CastSignature:
    """Infer the signature and memory of a cast.

    Args:
        shape: Of the value.
        dtype: Of the value.
        cast: The target of the cast.
        channel_dim: The value's channel dimension from 0, as in `Reduced.channel_dim`; None for none.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, the values are not floats or there is no channel dimension.
    """
    check_cast(torch.empty(tuple(shape), dtype=dtype, device="meta"), cast, channel_dim)
    byte_count = math.prod(shape) * cast.dtype.itemsize
    widened = math.prod(shape) * torch.float32.itemsize if cast.widens(dtype) else 0
    return CastSignature(cast.dtype, byte_count, _scale_count(shape, cast, channel_dim), byte_count + widened)


def check_cast(value: torch.Tensor, cast: Cast, channel_dim: int | None) -> None:
    """Check a cast against a value's signature.

    Raises:
        ServiceError: `REDUCTION_REJECTED`.
    """
    if value.dtype not in FLOATS and value.dtype not in FLOAT8:
        raise rejected(value, cast, "only float values can be cast; leave the cast out")
    if value.layout is not torch.strided:
        raise rejected(value, cast, "only dense values can be cast; leave the cast out")
    if cast.is_per_channel and (channel_dim is None or not 0 <= channel_dim < value.ndim):
        raise rejected(value, cast, "the value has no channel dimension; cast to int8 with one scale")


def _scale_count(shape: Sequence[int], cast: Cast, channel_dim: int | None) -> int:
    if cast.dtype is not torch.int8:
        return 0
    return shape[channel_dim] if cast.is_per_channel and channel_dim is not None else 1
