"""Reductions that select elements and compute nothing: index, take, crop, top-k."""

from dataclasses import replace
from types import EllipsisType

import torch

from trocar_server.reductions.reduction import Axis, Crop, Index, Slice, Take, TopK
from trocar_server.reductions.stage import ORDERED, Stage

_INT64_BYTES = 8


def index(stage: Stage, wanted: Index) -> Stage:
    """Select as NumPy's basic indexing does; an integer drops its dimension, a slice clips.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, too many items or a position out of range.
    """
    items = _without_ellipsis(stage, wanted)
    for dim, item in enumerate(items):
        if isinstance(item, int):
            _check_position(stage, wanted, dim, item)
    torch_items = tuple(
        _torch_slice(item, size) if isinstance(item, Slice) else item
        for item, size in zip(items, stage.shape, strict=True)
    )
    kept = [dim for dim, item in enumerate(items) if isinstance(item, Slice)]
    channels = kept.index(stage.channel_dim) if stage.channel_dim in kept else None
    return Stage(stage.value[torch_items], stage.has_samples and 0 in kept, channels)


def take(stage: Stage, wanted: Take) -> Stage:
    """Select positions of one dimension, as `numpy.take` does.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, there is no such dimension or position.
    """
    dim = _axis_dim(stage, wanted)
    size, count = stage.shape[dim], len(wanted.positions)
    for extreme in (min(wanted.positions), max(wanted.positions)):
        _check_position(stage, wanted, dim, extreme)
    shape = (*stage.shape[:dim], count, *stage.shape[dim + 1 :])
    stage.need_size(wanted, shape, stage.value.itemsize)
    positions = torch.tensor([position % size for position in wanted.positions], device=stage.value.device)
    return stage.to(stage.value.index_select(dim, positions), count * _INT64_BYTES)


def crop(stage: Stage, wanted: Crop) -> Stage:
    """Select a rectangle of the last two dimensions.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, the rectangle does not lie within them.
    """
    if len(stage.shape) < 2 + stage.has_samples:
        raise stage.refuse(wanted, "it needs two dimensions beside the samples; use an index instead")
    rows, columns = stage.shape[-2:]
    if wanted.top + wanted.height > rows or wanted.left + wanted.width > columns:
        raise stage.refuse(wanted, f"it must lie within the last two dimensions, {rows} x {columns}")
    cropped = stage.value.narrow(-2, wanted.top, wanted.height).narrow(-1, wanted.left, wanted.width)
    return stage.to(cropped)


def top_k(stage: Stage, wanted: TopK) -> Stage:
    """Select the k largest elements along a dimension, as `torch.topk`: NaN counts as largest.

    Of equal elements any may come; `indices` says which did.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, there is no order, no such dimension or fewer than k elements.
    """
    value, rank = stage.value, len(stage.shape)
    if value.dtype not in ORDERED:
        raise stage.refuse(wanted, "it sorts real numbers, no others; take the values as they are")
    if not -rank <= wanted.dim < rank:
        raise stage.refuse(wanted, f"there are {rank} dimensions; give a dimension that exists")
    dim = wanted.dim % rank
    if wanted.k > stage.shape[dim]:
        raise stage.refuse(wanted, f"dimension {dim} has {stage.shape[dim]:,} elements; ask for no more")
    shape = (*stage.shape[:dim], wanted.k, *stage.shape[dim + 1 :])
    if value.is_meta:  # as in `Stage.compute`, for two results
        values, indices = value.new_empty(shape), value.new_empty(shape, dtype=torch.int64)
    else:
        values, indices = value.topk(wanted.k, dim, largest=not wanted.is_smallest, sorted=True)
    return replace(stage, value=values, workspace_bytes=0, companions={"indices": indices})


def _without_ellipsis(stage: Stage, wanted: Index) -> list[int | Slice]:
    """Return one item for each dimension."""
    items: tuple[int | Slice | EllipsisType, ...] = (
        wanted.items if ... in wanted.items else (*wanted.items, ...)
    )
    missing = len(stage.shape) - (len(items) - 1)
    if missing < 0:
        raise stage.refuse(wanted, f"{len(items) - 1} items for {len(stage.shape)} dimensions; give fewer")
    found: list[int | Slice] = []
    for item in items:
        found += [Slice()] * missing if isinstance(item, EllipsisType) else [item]
    return found


def _check_position(stage: Stage, wanted: Index | Take, dim: int, position: int) -> None:
    size = stage.shape[dim]
    if not -size <= position < size:
        raise stage.refuse(wanted, f"position {position} is not among the {size:,} of dimension {dim}")


def _torch_slice(item: Slice, size: int) -> slice:
    """Return the same slice with bounds that are in range: torch adds them up in 64 bits."""
    start, stop, step = slice(item.start, item.stop, item.step).indices(size)
    return slice(start, max(start, stop), min(step, max(size, 1)))


def _axis_dim(stage: Stage, wanted: Take) -> int:
    if wanted.axis is Axis.CHANNELS:
        return stage.need_channels(wanted)
    if wanted.axis is Axis.TOKENS:
        return stage.need_tokens(wanted)
    stage.need_samples(wanted)
    return 0
