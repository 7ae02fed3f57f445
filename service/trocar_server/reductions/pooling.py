"""Positions pooled together: everything but samples and channels.

Results have the value's dtype. Of float16 and bfloat16, gem is computed in float32 and rounded once: the
third power of 41 is more than float16 holds.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from trocar_server.reductions.reduction import Pool, PoolKind
from trocar_server.reductions.stage import HALVES, ORDERED, Stage

GEM_FLOOR = 1e-6
"""Values are clamped to this before they are raised to a power, as in the authors' own code."""

_INT64_BYTES = 8

# torch's own annotations of the adaptive pools do not say that they take tuples of any length.
_ADAPTIVE_AVG: dict[int, Callable[..., torch.Tensor]] = {
    1: F.adaptive_avg_pool1d,
    2: F.adaptive_avg_pool2d,
    3: F.adaptive_avg_pool3d,
}
_ADAPTIVE_MAX: dict[int, Callable[..., torch.Tensor]] = {
    1: F.adaptive_max_pool1d,
    2: F.adaptive_max_pool2d,
    3: F.adaptive_max_pool3d,
}


def pool(stage: Stage, wanted: Pool) -> Stage:
    """Pool the positions, to a size or altogether.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, there are no positions, the size does not fit, or the values
            are no floats (`max` to no size takes integers and bool, too).
    """
    if wanted.kind is PoolKind.CLS:
        return _first_token(stage, wanted)
    _check_dtype(stage, wanted)
    positions = _positions(stage, wanted)
    return (
        _pool_to_size(stage, wanted, len(positions)) if wanted.size else _pool_all(stage, wanted, positions)
    )


def _first_token(stage: Stage, wanted: Pool) -> Stage:
    dim = stage.need_tokens(wanted)
    if stage.shape[dim] == 0:
        raise stage.refuse(wanted, "it has no token; take the value as it is")
    return Stage(stage.value.select(dim, 0), has_samples=True, channel_dim=1)


def _check_dtype(stage: Stage, wanted: Pool) -> None:
    if wanted.kind is not PoolKind.MAX or wanted.size:
        stage.need_floats(wanted)
    elif stage.value.dtype not in (*ORDERED, torch.bool):
        raise stage.refuse(wanted, "only real numbers have a largest; take the values as they are")


def _positions(stage: Stage, wanted: Pool) -> tuple[int, ...]:
    stage.need_samples(wanted)
    channels = stage.need_channels(wanted)
    dims = tuple(dim for dim in range(1, len(stage.shape)) if dim != channels)
    if not dims:
        raise stage.refuse(wanted, "it has samples and channels and nothing to pool; leave the pool out")
    if 0 in (stage.shape[dim] for dim in dims):
        raise stage.refuse(wanted, "it has no positions; take the value as it is")
    return dims


def _pool_all(stage: Stage, wanted: Pool, positions: tuple[int, ...]) -> Stage:
    value, kind = stage.value, wanted.kind
    shape = (stage.shape[0], stage.shape[stage.need_channels(wanted)])

    def work() -> torch.Tensor:
        if kind is PoolKind.MAX:
            return value.amax(positions)
        if kind is PoolKind.AVG:
            return value.mean(positions)
        return _gem(value, wanted.power, lambda powers: powers.mean(positions))

    workspace_bytes = _gem_bytes(stage, shape) if kind is PoolKind.GEM else 0
    pooled = stage.compute(shape, value.dtype, work)
    return Stage(pooled, has_samples=True, channel_dim=1, workspace_bytes=workspace_bytes)


def _pool_to_size(stage: Stage, wanted: Pool, rank: int) -> Stage:
    channels = stage.need_channels(wanted)
    size = wanted.size * rank if len(wanted.size) == 1 else wanted.size
    if rank > 3 or len(size) != rank:
        raise stage.refuse(
            wanted, f"there are {rank} dimensions to pool; give one size, or one for each of at most 3"
        )
    shape = (stage.shape[0], stage.shape[channels], *size)
    stage.need_size(wanted, shape, stage.value.itemsize + _INT64_BYTES)
    moved = stage.value.movedim(channels, 1)
    if moved.numel():
        pooled = stage.compute(shape, moved.dtype, lambda: _adaptive(moved, wanted, size))
    else:  # no sample or no channel; torch's max pools refuse the latter
        pooled = moved.new_empty(shape)
    workspace_bytes = stage.byte_count  # where the channels must be moved
    workspace_bytes += _gem_bytes(stage, shape) if wanted.kind is PoolKind.GEM else 0
    workspace_bytes += math.prod(shape) * _INT64_BYTES if wanted.kind is PoolKind.MAX else 0  # positions, too
    return stage.to(pooled.movedim(1, channels), workspace_bytes)


def _adaptive(value: torch.Tensor, wanted: Pool, size: tuple[int, ...]) -> torch.Tensor:
    average = _ADAPTIVE_AVG[len(size)]
    if wanted.kind is PoolKind.AVG:
        return average(value, size)
    if wanted.kind is PoolKind.GEM:
        return _gem(value, wanted.power, lambda powers: average(powers, size))
    return _ADAPTIVE_MAX[len(size)](value, size)


def _gem(value: torch.Tensor, power: float, average: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    clamped = value.float().clamp_(min=GEM_FLOOR) if value.dtype in HALVES else value.clamp(min=GEM_FLOOR)
    return average(clamped.pow_(power)).pow(1 / power).to(value.dtype)


def _gem_bytes(stage: Stage, shape: Sequence[int]) -> int:
    """Return the bytes of the powers, of their mean and of its root."""
    itemsize = max(stage.value.itemsize, torch.float32.itemsize)
    return (stage.value.numel() + 2 * math.prod(shape)) * itemsize
