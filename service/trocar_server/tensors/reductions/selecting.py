"""Selecting reductions, without arithmetic: index, take, tokens of spans, crop, grid, top-k."""

import math
from dataclasses import replace
from types import EllipsisType

import torch

from trocar_server.tensors.reductions.positions import Positions
from trocar_server.tensors.reductions.reduction import (
    Axis,
    Crop,
    Grid,
    Index,
    Slice,
    Spans,
    Take,
    TokenRows,
    TopK,
)
from trocar_server.tensors.reductions.reduction_stage import ORDERED, Stage

_INT64_BYTES = 8


def select(stage: Stage, wanted: Index | Take | Spans | Positions | TokenRows | Crop | Grid | TopK) -> Stage:
    """Apply one of the reductions of this module.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, see each of them.
    """
    match wanted:
        case Index():
            return index(stage, wanted)
        case Take():
            return take(stage, wanted)
        case Spans() | Positions():
            return spans(stage, wanted)
        case TokenRows():
            return token_rows(stage, wanted)
        case Crop():
            return crop(stage, wanted)
        case Grid():
            return grid(stage, wanted)
        case TopK():
            return top_k(stage, wanted)


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
    samples = kept.index(stage.samples_dim) if stage.samples_dim in kept else None
    selected = replace(stage.to(stage.value[torch_items]), samples_dim=samples, channel_dim=channels)
    if stage.mask is None:
        return selected
    mask_dims = tuple(kept.index(dim) for dim in stage.mask_dims if dim in kept)
    mask = stage.mask[tuple(torch_items[dim] for dim in stage.mask_dims)]
    return replace(selected, mask=mask, mask_dims=mask_dims)


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
    if stage.mask is not None and dim in stage.mask_dims:
        place = stage.mask_dims.index(dim)
        stage = replace(stage, mask=stage.mask.index_select(place, positions))
    return stage.to(stage.value.index_select(dim, positions), count * _INT64_BYTES)


def spans(stage: Stage, wanted: Spans | Positions) -> Stage:
    """Return the stage as it is: how many tokens there will be is known once the texts are tokenized.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, the value is not (batch, tokens, width).
    """
    stage.need_tokens(wanted)
    return stage


def token_rows(stage: Stage, wanted: TokenRows) -> Stage:
    """Select other tokens of each sample, filled up with zeros, which the stage's mask leaves out.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, the value has other tokens than the texts.
    """
    stage = stage.of_tokens(wanted)
    batch, tokens, width = stage.shape
    if (batch, tokens) != (len(wanted.rows), wanted.token_count):
        raise stage.refuse(
            wanted,
            f"the texts are {len(wanted.rows)} of {wanted.token_count} tokens; select before other axes",
        )
    shape = (batch, wanted.longest, width)
    device = stage.value.device
    lengths = torch.tensor([len(row) for row in wanted.rows], device=device)[:, None]
    mask = torch.arange(wanted.longest, device=device) < lengths

    def work() -> torch.Tensor:
        filled = [[*row, *[0] * (wanted.longest - len(row))] for row in wanted.rows]
        samples = torch.arange(batch, device=device)[:, None]
        return stage.value[samples, torch.tensor(filled, device=device)].masked_fill(~mask[:, :, None], 0)

    value = stage.compute(shape, stage.value.dtype, work)
    is_ragged = not stage.value.is_meta and min(map(len, wanted.rows)) < wanted.longest
    filled = stage.to(value, 2 * batch * wanted.longest * _INT64_BYTES)
    mask_dims = (0, 1) if is_ragged else ()
    return replace(filled, mask=mask if is_ragged else None, mask_dims=mask_dims, is_filled=is_ragged)


def crop(stage: Stage, wanted: Crop) -> Stage:
    """Select a rectangle of the last two dimensions.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, the rectangle is not within them.
    """
    if len(stage.shape) < 2 + (stage.samples_dim is not None):
        raise stage.refuse(wanted, "it needs two dimensions beside the samples; use an index instead")
    rows, columns = stage.shape[-2:]
    if wanted.top + wanted.height > rows or wanted.left + wanted.width > columns:
        raise stage.refuse(wanted, f"it must lie within the last two dimensions, {rows} x {columns}")
    cropped = stage.value.narrow(-2, wanted.top, wanted.height).narrow(-1, wanted.left, wanted.width)
    rank = len(stage.shape)
    for dim, start, size in ((rank - 2, wanted.top, wanted.height), (rank - 1, wanted.left, wanted.width)):
        if stage.mask is not None and dim in stage.mask_dims:
            stage = replace(stage, mask=stage.mask.narrow(stage.mask_dims.index(dim), start, size))
    return stage.to(cropped)


def grid(stage: Stage, wanted: Grid) -> Stage:
    """Fold patch tokens to rows and columns; the channels become dimension 1.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, the value is not (batch, tokens, width), or has other tokens.
    """
    stage = stage.of_tokens(wanted)
    batch, tokens, channels = stage.shape
    if not wanted.height:
        raise stage.refuse(wanted, "the model's patches are not known for it; give height, width and prefix")
    if wanted.prefix_count + wanted.height * wanted.width != tokens:
        prefix = f"{wanted.prefix_count} + " if wanted.prefix_count else ""
        raise stage.refuse(wanted, f"it has {tokens} tokens, not {prefix}{wanted.height} x {wanted.width}")
    patches = stage.value[:, wanted.prefix_count :].transpose(1, 2)
    return Stage(patches.reshape(batch, channels, wanted.height, wanted.width), 0, 1)


def top_k(stage: Stage, wanted: TopK) -> Stage:
    """Select the k largest elements along a dimension, as `torch.topk`: NaN counts as largest.

    Of equal elements any may be selected; `indices` says which. Along tokens or samples padding is not
    selected: where fewer than k are left, zeros with the index -1 follow, which the stage's mask leaves out.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, there is no order, no such dimension or fewer than k elements.
    """
    value, rank = stage.value, len(stage.shape)
    if value.dtype not in ORDERED:
        raise stage.refuse(wanted, "only real numbers can be sorted; leave the reduction out")
    if not -rank <= wanted.dim < rank:
        raise stage.refuse(wanted, f"there are {rank} dimensions; give a dimension that exists")
    dim = wanted.dim % rank
    if wanted.k > stage.shape[dim]:
        raise stage.refuse(wanted, f"dimension {dim} has {stage.shape[dim]:,} elements; ask for no more")
    shape = (*stage.shape[:dim], wanted.k, *stage.shape[dim + 1 :])
    if stage.own is not None and dim in stage.mask_dims:
        return _top_k_of_own(stage, stage.own, wanted, dim)
    if value.is_meta:  # as in `Stage.compute`, for two results
        values, indices = value.new_empty(shape), value.new_empty(shape, dtype=torch.int64)
    else:
        values, indices = value.topk(wanted.k, dim, largest=not wanted.is_smallest, sorted=True)
    return replace(stage, value=values, workspace_bytes=0, companions={"indices": indices})


def _top_k_of_own(stage: Stage, own: torch.Tensor, wanted: TopK, dim: int) -> Stage:
    """Select along a dimension of the mask, with padding behind all other elements."""
    last = _last_in_order(stage.value.dtype, is_smallest=wanted.is_smallest)
    is_own = own.expand_as(stage.value)
    filled = stage.value.masked_fill(~is_own, last)
    indices = filled.topk(wanted.k, dim, largest=not wanted.is_smallest, sorted=True).indices
    places = torch.arange(wanted.k, device=own.device)
    places = places.reshape([-1 if other == dim else 1 for other in range(own.ndim)])
    is_last = filled.isnan() if math.isnan(last) else filled == last
    indices = _own_before_padding(indices, is_last, is_own, places, dim)
    chosen = places < own.sum(dim, keepdim=True)
    is_filling = ~chosen
    companions = {"indices": indices.masked_fill(is_filling, -1)}
    values = filled.gather(dim, indices).masked_fill(is_filling, 0)
    mask = chosen.reshape([chosen.shape[other] for other in stage.mask_dims])
    return replace(stage.to(values), companions=companions, mask=mask, is_filled=True)


def _own_before_padding(
    indices: torch.Tensor, is_last: torch.Tensor, is_own: torch.Tensor, places: torch.Tensor, dim: int
) -> torch.Tensor:
    """Return the indices of a top-k with padding behind own elements that are equal to its filling.

    Args:
        indices: Those of `torch.topk`, which selects any of equal elements.
        is_last: Which elements are last in the order: all padding, and perhaps some own.
        is_own: Which elements are not padding.
        places: The places of the top-k, 0 to k - 1, along the dimension.
        dim: The dimension.
    """
    before = (~is_last.gather(dim, indices)).sum(dim, keepdim=True)
    own = (is_last & is_own).to(torch.uint8).topk(indices.shape[dim], dim).indices
    return torch.where(places < before, indices, own.gather(dim, (places - before).clamp(min=0)))


def _last_in_order(dtype: torch.dtype, *, is_smallest: bool) -> float:
    """Return the number that a top-k takes last."""
    if dtype.is_floating_point:
        return math.nan if is_smallest else -math.inf
    return torch.iinfo(dtype).max if is_smallest else torch.iinfo(dtype).min


def _without_ellipsis(stage: Stage, wanted: Index) -> list[int | Slice]:
    """Return one item for each dimension."""
    items: tuple[int | Slice | EllipsisType, ...] = (
        wanted.items if ... in wanted.items else (*wanted.items, ...)
    )
    missing = len(stage.shape) - (len(items) - 1)
    if missing < 0:
        raise stage.refuse(wanted, f"{len(items) - 1} items for {len(stage.shape)} dimensions; give fewer")
    result: list[int | Slice] = []
    for item in items:
        result += [Slice()] * missing if isinstance(item, EllipsisType) else [item]
    return result


def _check_position(stage: Stage, wanted: Index | Take, dim: int, position: int) -> None:
    size = stage.shape[dim]
    if not -size <= position < size:
        problem = f"position {position} is not among the {size:,} of dimension {dim}, 0 to {size - 1:,}"
        raise stage.refuse(wanted, problem)


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
    assert stage.samples_dim is not None
    return stage.samples_dim
