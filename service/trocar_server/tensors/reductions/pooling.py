"""Pooling of positions: every dimension but samples and channels.

Results have the value's dtype. Of float16 and bfloat16, gem is computed in float32 and rounded once: the
third power of 41 overflows float16.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from trocar_server.tensors.reductions.reduction import Peak, Pool, PooledNorm, PoolKind
from trocar_server.tensors.reductions.reduction_stage import HALVES, ORDERED, Stage

GEM_FLOOR = 1e-6
"""Values are clamped to this before they are raised to a power, as in the authors' own code."""

_INT64_BYTES = 8

# torch's own annotations of the adaptive pools lack tuples of any length.
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


def pooled(stage: Stage, wanted: Pool | Peak | PooledNorm) -> Stage:
    """Apply one of the reductions over positions.

    Raises:
        ServiceError: As for each of them.
    """
    match wanted:
        case Pool():
            return pool(stage, wanted)
        case Peak():
            return peak(stage, wanted)
        case PooledNorm():
            return pool_with_norm(stage, wanted)


def pool(stage: Stage, wanted: Pool) -> Stage:
    """Pool the positions, to a size or completely.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, there are no positions, the size does not fit, or the values
            are not floats (`max` without a size takes integers and bool, too).
    """
    if wanted.kind in (PoolKind.CLS, PoolKind.LAST):
        return _one_token(stage.of_tokens(wanted), wanted)
    _check_dtype(stage, wanted)
    stage = stage.need_samples(wanted)
    positions = _positions(stage, wanted)
    return (
        _pool_to_size(stage, wanted, len(positions)) if wanted.size else _pool_all(stage, wanted, positions)
    )


def peak(stage: Stage, wanted: Peak) -> Stage:
    """Find the largest value of each channel and its position; NaN counts as largest, as in `torch.max`.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, there are no positions, or the values have no order.
    """
    if stage.value.dtype not in ORDERED:
        raise stage.refuse(wanted, "only real numbers can be compared; leave the reduction out")
    stage = stage.need_samples(wanted)
    _positions(stage, wanted)
    channels = stage.need_channels(wanted)
    shape = (stage.shape[0], stage.shape[channels])
    if stage.value.is_meta:  # as in `Stage.compute`, for two results
        largest, indices = stage.value.new_empty(shape), stage.value.new_empty(shape, dtype=torch.int64)
    else:
        value = stage.value
        if stage.own is not None:
            value = value.masked_fill(~stage.own, _smallest(value.dtype))
        largest, indices = value.movedim(channels, 1).flatten(2).max(2)
    return Stage(largest, 0, 1, stage.byte_count, {"indices": indices})


def pool_with_norm(stage: Stage, wanted: PooledNorm) -> Stage:
    """Return the mean over the positions as `pool` does, and behind the channels that of the vectors' norms.

    A value without positions is its own mean. In float32.

    Raises:
        ServiceError: As for `pool`.
    """
    stage.need_floats(wanted)
    stage = stage.need_samples(wanted)
    channels = stage.need_channels(wanted)
    norms = stage.value.new_empty(()) if stage.value.is_meta else _norms(stage.value, channels)
    shape = (stage.shape[0], stage.shape[channels] + 1)

    def work() -> torch.Tensor:
        average = Pool(PoolKind.AVG)
        has_positions = len(stage.shape) > 2
        parts = [replace(stage, value=value) for value in (stage.value, norms)]
        pooled = [pool(part, average).value if has_positions else part.value for part in parts]
        return torch.cat([part.float() for part in pooled], 1)

    if stage.value.is_meta and len(stage.shape) > 2:
        _positions(stage, Pool(PoolKind.AVG))
    workspace_bytes = stage.value.numel() * torch.float32.itemsize
    return Stage(stage.compute(shape, torch.float32, work), 0, 1, workspace_bytes)


def _norms(value: torch.Tensor, channels: int) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(value, dim=channels, keepdim=True, dtype=torch.float32)
    return norms


def _one_token(stage: Stage, wanted: Pool) -> Stage:
    """Select the first or the last token of each sample that is no padding, of (batch, tokens, width)."""
    if stage.shape[1] == 0:
        raise stage.refuse(wanted, "it has no tokens; leave the pool out")
    is_last = wanted.kind is PoolKind.LAST
    if stage.mask is None:
        return Stage(stage.value.select(1, -1 if is_last else 0), 0, 1)
    kept = stage.mask.flip(1) if is_last else stage.mask
    places = kept.to(torch.uint8).argmax(1)  # the first of the ones (torch 2.14)
    places = kept.shape[1] - 1 - places if is_last else places
    rows = torch.arange(len(places), device=places.device)
    return Stage(stage.value[rows, places], 0, 1)


def _check_dtype(stage: Stage, wanted: Pool) -> None:
    if wanted.kind is not PoolKind.MAX or wanted.size:
        stage.need_floats(wanted)
    elif stage.value.dtype not in (*ORDERED, torch.bool):
        raise stage.refuse(wanted, "only real numbers can be compared; leave the reduction out")


def _positions(stage: Stage, wanted: Pool | Peak) -> tuple[int, ...]:
    channels = stage.need_channels(wanted)
    dims = tuple(dim for dim in range(1, len(stage.shape)) if dim != channels)
    if not dims:
        raise stage.refuse(
            wanted, f"it has no positions beside batch and channels; leave the {_word(wanted)} out"
        )
    if 0 in (stage.shape[dim] for dim in dims):
        raise stage.refuse(wanted, f"it has no positions; leave the {_word(wanted)} out")
    return dims


def _word(wanted: Pool | Peak) -> str:
    return "pool" if isinstance(wanted, Pool) else "peak"


def _pool_all(stage: Stage, wanted: Pool, positions: tuple[int, ...]) -> Stage:
    value, kind = stage.value, wanted.kind
    shape = (stage.shape[0], stage.shape[stage.need_channels(wanted)])

    def work() -> torch.Tensor:
        if stage.own is not None:
            return _pool_own_positions(stage, stage.own, wanted, positions)
        if kind is PoolKind.MAX:
            return value.amax(positions)
        if kind is PoolKind.AVG:
            return value.mean(positions)
        return _gem(value, wanted.power, lambda powers: powers.mean(positions))

    workspace_bytes = _gem_bytes(stage, shape) if kind is PoolKind.GEM else 0
    pooled = stage.compute(shape, value.dtype, work)
    return Stage(pooled, 0, 1, workspace_bytes)


def _pool_own_positions(
    stage: Stage, own: torch.Tensor, wanted: Pool, positions: tuple[int, ...]
) -> torch.Tensor:
    """Pool the positions that are no padding; where all are padding to NaN, or the smallest value."""
    value = stage.value
    if wanted.kind is PoolKind.MAX:
        return value.masked_fill(~own, _smallest(value.dtype)).amax(positions)
    whole = math.prod(value.shape[dim] for dim in positions if own.shape[dim] == 1)
    counts = own.sum(positions) * whole  # (batch, 1): the channels are no dimension of the mask

    def mean(powers: torch.Tensor) -> torch.Tensor:
        wide = powers.float() if powers.dtype in HALVES else powers
        return (wide.where(own, 0).sum(positions) / counts).to(powers.dtype)

    return mean(value) if wanted.kind is PoolKind.AVG else _gem(value, wanted.power, mean)


def _smallest(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return -math.inf
    return False if dtype is torch.bool else torch.iinfo(dtype).min


def _pool_to_size(stage: Stage, wanted: Pool, rank: int) -> Stage:
    channels = stage.need_channels(wanted)
    size = wanted.size * rank if len(wanted.size) == 1 else wanted.size
    if rank > 3 or len(size) != rank:
        raise stage.refuse(
            wanted, f"there are {rank} dimensions to pool; give one size, or one for each of at most 3"
        )
    shape = (stage.shape[0], stage.shape[channels], *size)
    stage.need_size(wanted, shape, stage.value.itemsize + _INT64_BYTES)
    pooled = stage.compute(shape, stage.value.dtype, lambda: _sized(stage, wanted, size))
    workspace_bytes = stage.byte_count  # for moving the channels, where needed
    workspace_bytes += _gem_bytes(stage, shape) if wanted.kind is PoolKind.GEM else 0
    workspace_bytes += math.prod(shape) * _INT64_BYTES if wanted.kind is PoolKind.MAX else 0  # positions, too
    pooled = pooled.movedim(1, channels)
    return replace(stage.to(pooled, workspace_bytes), mask=None, mask_dims=(), is_filled=False)


def _sized(stage: Stage, wanted: Pool, size: tuple[int, ...]) -> torch.Tensor:
    """Pool to a size, with the channels in dimension 1."""
    moved = stage.value.movedim(stage.need_channels(wanted), 1)
    if not moved.numel():  # no sample or no channel; torch's max pools reject the latter
        return moved.new_empty((*moved.shape[:2], *size))
    if stage.own is None:
        return _adaptive(moved, wanted, size)
    channels = stage.need_channels(wanted)
    pairs = zip(stage.value, stage.own, strict=True)
    return torch.cat(
        [_pool_own(_cropped(value, own).movedim(channels - 1, 0)[None], wanted, size) for value, own in pairs]
    )


def _cropped(value: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return one sample's own positions: of its mask each dimension is one for itself."""
    for dim in range(own.ndim):
        if own.shape[dim] > 1 or value.shape[dim] == 1:
            others = [other for other in range(own.ndim) if other != dim]
            value = value[(slice(None),) * dim + (own.amax(others) if others else own,)]
    return value


def _pool_own(value: torch.Tensor, wanted: Pool, size: tuple[int, ...]) -> torch.Tensor:
    """Pool one sample's own positions, (1, channels, ...); without one as `_pool_own_positions` does."""
    if value.numel():
        return _adaptive(value, wanted, size)
    nothing = _smallest(value.dtype) if wanted.kind is PoolKind.MAX else math.nan
    return value.new_full((*value.shape[:2], *size), nothing)


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
