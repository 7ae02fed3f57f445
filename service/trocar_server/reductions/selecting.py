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
    sizes = stage.shape
    torch_items = tuple(
        _position(stage, wanted, dim, item) if isinstance(item, int) else _torch_slice(item, sizes[dim])
        for dim, item in enumerate(items)
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
    outside = next((position for position in wanted.positions if not -size <= position < size), None)
    if outside is not None:
        raise stage.refuse(wanted, f"position {outside} is not among the {size:,} of dimension {dim}")
    shape = (*stage.shape[:dim], count, *stage.shape[dim + 1 :])
    stage.need_size(wanted, shape, stage.value.itemsize)
    positions = torch.tensor([position % size for position in wanted.positions], device=stage.value.device)
    return stage.to(stage.value.index_select(dim, positions), count * _INT64_BYTES)


def crop(stage: Stage, wanted: Crop) -> Stage:
    """Select a rectangle of the last two dimensions.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, the rectangle does not lie within them.
    """
    if len(stage.shape) < 2:
        raise stage.refuse(wanted, "it needs two dimensions; use an index for values with fewer")
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
    found = value.topk(wanted.k, dim, largest=not wanted.is_smallest, sorted=True)
    return replace(stage, value=found.values, workspace_bytes=0, companions={"indices": found.indices})


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


def _position(stage: Stage, wanted: Index, dim: int, position: int) -> int:
    size = stage.shape[dim]
    if not -size <= position < size:
        raise stage.refuse(wanted, f"position {position} is not among the {size:,} of dimension {dim}")
    return position


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
