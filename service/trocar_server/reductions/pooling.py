"""Positions pooled together: everything but samples and channels.

Results have the value's dtype. Of float16 and bfloat16, gem is computed in float32 and rounded once: the
third power of 41 is more than float16 holds.
"""

from collections.abc import Callable

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
    value = stage.value
    if wanted.kind is PoolKind.MAX:
        pooled, workspace_bytes = value.amax(positions), 0
    elif wanted.kind is PoolKind.AVG:
        pooled, workspace_bytes = value.mean(positions), 0
    else:
        pooled, workspace_bytes = _gem(stage, wanted.power, lambda powers: powers.mean(positions))
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
    moved = stage.to(stage.value.movedim(channels, 1))
    if not moved.value.numel():  # no sample or no channel; torch's max pools refuse the latter
        pooled, workspace_bytes = moved.value.new_empty(shape), 0
    else:
        pooled, workspace_bytes = _adaptive(moved, wanted, size)
    return stage.to(pooled.movedim(1, channels), workspace_bytes + stage.byte_count)


def _adaptive(stage: Stage, wanted: Pool, size: tuple[int, ...]) -> tuple[torch.Tensor, int]:
    average = _ADAPTIVE_AVG[len(size)]
    if wanted.kind is PoolKind.AVG:
        return average(stage.value, size), 0
    if wanted.kind is PoolKind.GEM:
        return _gem(stage, wanted.power, lambda powers: average(powers, size))
    pooled = _ADAPTIVE_MAX[len(size)](stage.value, size)
    return pooled, pooled.numel() * _INT64_BYTES  # torch finds the positions, too


def _gem(
    stage: Stage, power: float, average: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, int]:
    value = stage.value.float() if stage.value.dtype in HALVES else stage.value
    mean = average(value.clamp(min=GEM_FLOOR).pow(power))
    return mean.pow(1 / power).to(stage.value.dtype), 3 * value.numel() * value.itemsize + 2 * mean.nbytes
