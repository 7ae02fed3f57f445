"""Rules of operators that move, cut, join and repeat elements: where rows are in their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from trocar_server.surgery.rows.call import Call, Places, apart, met, moved
from trocar_server.surgery.rows.place import MixedRowsError, Rows, count_of, dim_of_rows

Rule: TypeAlias = Callable[[Call], Places]
"""Returns where the rows are in the results of a call; raises `MixedRowsError`."""

_TO_THE_END = 1 << 62


def same(call: Call) -> Places:
    """As in the first tensor."""
    return call.rows_or_numbers(call.tensors[0])


def filled(call: Call) -> Places:
    """One value everywhere: rows, where a dimension is as long as their number."""
    if isinstance(call.argument("fill_value"), Node):
        raise MixedRowsError("it makes a constant of the number of rows")
    dim = dim_of_rows(call.output_sizes)
    if dim is None:
        return None
    if call.output_sizes[dim].length != 1:
        raise MixedRowsError("it makes a constant for several rows together")
    return Rows(dim)


def filled_like(call: Call) -> Places:
    """One value everywhere, in the shape of a tensor."""
    return call.rows(call.tensors[0])


def numbered(call: Call) -> Places:
    """The numbers from 0; of the rows where these are as many."""
    dim = dim_of_rows(call.output_sizes)
    if dim is None:
        return None
    if call.argument("start", 0) != 0 or call.argument("step", 1) != 1:
        raise MixedRowsError("it counts rows")
    return Rows(dim, is_number=True)


def view(call: Call) -> Places:
    """Other dimensions of the same elements in the same order."""
    tensor = call.tensors[0]
    rows = call.rows_or_numbers(tensor)
    if rows is None:
        return None
    after = rows.after * count_of(call.sizes(tensor)[rows.dim + 1 :])
    sizes = call.output_sizes
    dim = dim_of_rows(sizes)
    behind = 1 if dim is None else count_of(sizes[dim + 1 :])
    if dim is None or not behind or after % behind or sizes[dim].length % (after // behind):
        raise MixedRowsError("it cuts across rows")
    inner = after // behind
    return replace(rows, dim=dim, before=sizes[dim].length // inner, after=inner)


def permute(call: Call) -> Places:
    """Dimensions in another order."""
    tensor = call.tensors[0]
    rows = call.rows_or_numbers(tensor)
    return rows if rows is None else replace(rows, dim=call.dims(tensor, "dims").index(rows.dim))


def transpose(call: Call) -> Places:
    """Two dimensions change places; of `t` the only two."""
    tensor = call.tensors[0]
    rows, rank = call.rows_or_numbers(tensor), call.rank(tensor)
    if rows is None or rank < 2:
        return rows
    first, second = (0, 1) if call.name == "t" else (call.dim(tensor, "dim0"), call.dim(tensor, "dim1"))
    return replace(rows, dim={first: second, second: first}.get(rows.dim, rows.dim))


def unsqueeze(call: Call) -> Places:
    """A new dimension of one element."""
    tensor = call.tensors[0]
    rows = call.rows_or_numbers(tensor)
    dim = int(call.argument("dim")) % (call.rank(tensor) + 1)
    return rows if rows is None else moved(rows, dim <= rows.dim)


def squeeze(call: Call) -> Places:
    """Without dimensions of one element."""
    tensor = call.tensors[0]
    rows, sizes = call.rows_or_numbers(tensor), call.sizes(tensor)
    if rows is None:
        return None
    dropped = [dim for dim in call.dims(tensor) if sizes[dim] == (1, False)]
    return moved(rows, -sum(dim < rows.dim for dim in dropped))


def expand(call: Call) -> Places:
    """New dimensions, and longer ones of repeated elements."""
    tensor = call.tensors[0]
    rows = call.rows_or_numbers(tensor)
    return filled(call) if rows is None else moved(rows, call.output_rank - call.rank(tensor))


def repeat(call: Call) -> Places:
    """Each dimension so many times, one after the other."""
    tensor, sizes = call.tensors[0], call.output_sizes
    rows, steps = call.rows(tensor), call.output_rank - call.rank(tensor)
    dim = dim_of_rows(sizes)
    if dim is None:
        if rows is None:
            return None
        raise MixedRowsError("it repeats rows")
    if rows is None:
        own = [*[1] * steps, *(size.length for size in call.sizes(tensor))][dim]
        if sizes[dim].length != own:
            raise MixedRowsError("it repeats a constant several times for each row")
        return Rows(dim, after=own)
    if dim != rows.dim + steps:
        raise MixedRowsError("it repeats rows")
    times, rest = divmod(sizes[dim].length, rows.before * rows.after)
    if rest:
        raise MixedRowsError("it repeats rows")
    return replace(rows, dim=dim, before=rows.before * times)


def select(call: Call) -> Places:
    """Without one dimension: one index of it, or each."""
    tensor = call.tensors[0]
    rows, dim = call.rows(tensor), call.dim(tensor)
    apart(rows, [dim])
    place = rows if rows is None else moved(rows, -(dim < rows.dim))
    return [place] * call.output_count if call.name == "unbind" else place


def slice_(call: Call) -> Places:
    """A part of one dimension."""
    tensor = call.tensors[0]
    rows, dim = call.rows_or_numbers(tensor), call.dim(tensor)
    is_whole = _is_whole(call)
    if not is_whole and call.has_row_counts:
        raise MixedRowsError("it cuts at a number of rows")
    return rows if is_whole else apart(rows, [dim])


def _is_whole(call: Call) -> bool:
    """Whether a slice has all elements of its dimension."""
    start, stop, step = (
        call.argument(name, default) for name, default in (("start", 0), ("end", None), ("step", 1))
    )
    return start in (None, 0) and step in (None, 1) and (stop is None or _is_beyond(stop))


def _is_beyond(stop: Any) -> bool:
    return isinstance(stop, int) and stop >= _TO_THE_END - 1


def split(call: Call) -> Places:
    """Parts of one dimension."""
    tensor = call.tensors[0]
    return [apart(call.rows(tensor), [call.dim(tensor)])] * call.output_count


def cat(call: Call) -> Places:
    """Tensors one after the other along one dimension."""
    return apart(met(map(call.rows, call.tensors)), [call.dim(call.tensors[-1])])


def stack(call: Call) -> Places:
    """Tensors along a new dimension."""
    rows = met(map(call.rows, call.tensors))
    dim = int(call.argument("dim", 0)) % (call.rank(call.tensors[0]) + 1)
    return rows if rows is None else moved(rows, dim <= rows.dim)


def along(call: Call) -> Places:
    """As in the first tensor, in each result; elements along dimensions of it depend on each other."""
    tensor = call.tensors[0]
    rows = apart(call.rows(tensor), call.dims(tensor, "dims" if call.name in ("flip", "roll") else "dim"))
    return rows if call.output_count == 1 else [rows] * call.output_count


def ranked(call: Call) -> Places:
    """As in the first tensor, in each result; elements are ranked along one dimension, or the last."""
    tensor = call.tensors[0]
    rows = apart(call.rows(tensor), [call.dim(tensor, default=-1)])
    return rows if call.name == "argsort" else [rows] * call.output_count


def triangle(call: Call) -> Places:
    """As in the tensor; zeros by the index in the last two dimensions."""
    tensor = call.tensors[0]
    return apart(call.rows(tensor), range(call.rank(tensor))[-2:])


def pad(call: Call) -> Places:
    """More elements at both ends of the last dimensions."""
    tensor = call.tensors[0]
    given = call.argument("pad") or call.argument("padding")
    return apart(call.rows(tensor), range(call.rank(tensor))[-len(given) // 2 :])


def unfold(call: Call) -> Places:
    """Windows along one dimension; the positions within each are the last dimension."""
    tensor = call.tensors[0]
    return apart(call.rows(tensor), [call.dim(tensor, "dimension")])


def strided(call: Call) -> Places:
    """The same memory with other strides: known where these are as before."""
    before, after = call.tensors[0].meta["val"], call.node.meta["val"]
    if before.shape == after.shape and before.stride() == after.stride():
        return call.rows_or_numbers(call.tensors[0])
    if call.rows_or_numbers(call.tensors[0]) is None:
        return None
    raise MixedRowsError("it reads memory with other strides")


def index_select(call: Call) -> Places:
    """Positions of one dimension given by one tensor."""
    tensor, index = call.tensors
    rows, dim = call.rows(tensor), call.dim(tensor)
    chosen = call.rows(index)
    if chosen is not None and rows is not None:
        raise MixedRowsError("each row chooses among all rows")
    return apart(rows, [dim]) if chosen is None else replace(chosen, dim=dim)


def gather(call: Call) -> Places:
    """One element for each position of an index."""
    tensor, index = call.tensors[:2]
    rows, chosen, dim = call.rows(tensor), call.rows(index), call.dim(tensor)
    if rows is None:
        if chosen is not None and chosen.dim != dim:
            raise MixedRowsError("it reads a constant by the numbers of rows")
        return chosen
    if chosen != apart(rows, [dim]):
        raise MixedRowsError("it reads other rows")
    return rows


def scattered(call: Call) -> Places:
    """Values written to positions of a dimension."""
    rows = {call.rows(tensor) for tensor in call.tensors}
    if len(rows) > 1:
        raise MixedRowsError("it writes to other rows")
    return apart(rows.pop(), [call.dim(call.tensors[0])])


def slice_scatter(call: Call) -> Places:
    """A tensor with another one in place of a part of a dimension."""
    tensor, source = call.tensors[:2]
    dim = call.dim(tensor)
    if _is_whole(call):
        return met([call.rows(source)])
    if call.has_row_counts:
        raise MixedRowsError("it cuts at a number of rows")
    return apart(met([call.rows(tensor), call.rows(source)]), [dim])


def select_scatter(call: Call) -> Places:
    """A tensor with another one in place of an index of a dimension."""
    tensor, source = call.tensors[:2]
    dim, written = call.dim(tensor), call.rows(source)
    written = written if written is None else moved(written, dim <= written.dim)
    return apart(met([call.rows(tensor), written]), [dim])


def index(call: Call) -> Places:
    """Positions given by tensors of whole numbers."""
    return _indexed(call, call.tensors[0])


def index_put(call: Call) -> Places:
    """Values written to positions that tensors give."""
    tensor, values = call.argument("self"), call.argument("values")
    rows, written = call.rows(tensor), call.rows(values)
    masks = [i for i in call.argument("indices") if i is not None and _is_mask(i)]
    if masks:
        is_plain = len(call.argument("indices")) == 1 and not call.rank(values) and written is None
        if not is_plain or call.rows(masks[0]) != rows:
            raise MixedRowsError("it writes to the rows of a mask")
        return rows
    place = _indexed(call, tensor)
    if written is not None:
        written = moved(written, _indexed_rank(call, tensor) - call.rank(values))
    if (place is None) != (rows is None) or met([place, written]) != place:
        raise MixedRowsError("it writes to other rows")
    return rows


def _is_mask(tensor: Any) -> bool:
    return tensor.meta["val"].dtype in (torch.bool, torch.uint8)


def _given(call: Call, tensor: Any) -> list[Any]:
    given = list(call.argument("indices"))
    return [*given, *[None] * (call.rank(tensor) - len(given))]


def _indexed_rank(call: Call, tensor: Any) -> int:
    given = [i for i in _given(call, tensor) if i is not None]
    return call.rank(tensor) - len(given) + max(map(call.rank, given))


def _indexed(call: Call, tensor: Any) -> Rows | None:
    """Return where the rows are in what tensors of whole numbers choose from a tensor."""
    given = _given(call, tensor)
    places = [dim for dim, i in enumerate(given) if i is not None]
    if any(_is_mask(given[dim]) for dim in places):
        raise MixedRowsError("a mask chooses elements of all rows")
    rank = max(call.rank(given[dim]) for dim in places)
    start = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    rows, chosen = call.rows(tensor), [_chosen(call, given[dim], start + rank) for dim in places]
    by_number = [place for place in chosen if place is not None and place.is_number]
    others = met(place for place in chosen if place is not None and not place.is_number)
    if rows is not None and rows.dim in places:
        own = chosen[places.index(rows.dim)]
        if own is None or not own.is_number or len(by_number) > 1 or (rows.before, rows.after) != (1, 1):
            raise MixedRowsError("it chooses among rows")
        return met([replace(own, is_number=False), others])
    if by_number:
        raise MixedRowsError("it reads a constant by the numbers of rows")
    if rows is None:
        return others
    if others is not None:
        raise MixedRowsError("each row chooses among all rows")
    left = sum(given[dim] is None for dim in range(rows.dim))
    return replace(rows, dim=left if left < start else left + rank)


def _chosen(call: Call, chosen: Any, end: int) -> Rows | None:
    """Return where the rows of an index are in the result, whose chosen dimensions end there."""
    rows = call.rows_or_numbers(chosen)
    return rows if rows is None else moved(rows, end - call.rank(chosen))


def _names(text: str) -> list[str]:
    return text.split()


RULES: dict[str, Rule] = {
    **dict.fromkeys(_names("clone alias detach contiguous lift lift_fresh_copy _to_copy to"), same),
    **dict.fromkeys(
        _names("full zeros ones empty new_full new_zeros new_ones new_empty scalar_tensor"), filled
    ),
    **dict.fromkeys(_names("full_like zeros_like ones_like empty_like"), filled_like),
    "arange": numbered,
    **dict.fromkeys(_names("view _unsafe_view reshape view_copy"), view),
    "permute": permute,
    **dict.fromkeys(("transpose", "t"), transpose),
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    "expand": expand,
    "repeat": repeat,
    **dict.fromkeys(("select", "unbind"), select),
    **dict.fromkeys(("slice", "narrow"), slice_),
    **dict.fromkeys(_names("split split_with_sizes chunk unsafe_split unsafe_chunk"), split),
    "cat": cat,
    "stack": stack,
    **dict.fromkeys(
        _names(
            "softmax log_softmax _softmax _log_softmax cumsum cumprod logcumsumexp cummax cummin flip roll "
            "glu"
        ),
        along,
    ),
    **dict.fromkeys(("topk", "sort", "argsort"), ranked),
    **dict.fromkeys(("tril", "triu"), triangle),
    **dict.fromkeys(
        _names(
            "pad constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
            "replication_pad2d replication_pad3d"
        ),
        pad,
    ),
    "unfold": unfold,
    "as_strided": strided,
    "index_select": index_select,
    "gather": gather,
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce"), scattered),
    "slice_scatter": slice_scatter,
    "select_scatter": select_scatter,
    **dict.fromkeys(("index", "_unsafe_index"), index),
    **dict.fromkeys(("index_put", "_unsafe_index_put"), index_put),
}
TAKE_ROW_COUNTS = frozenset(
    _names(
        "full zeros ones empty new_full new_zeros new_ones new_empty arange view _unsafe_view reshape "
        "view_copy expand repeat slice slice_scatter"
    )
)
"""Operators whose arguments may have the number of rows in them: as sizes, which their results show."""
