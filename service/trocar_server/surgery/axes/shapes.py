"""Rules of operators that move, cut and join dimensions."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trocar_server.surgery.axes.axis import (
    Axis,
    Digit,
    Dim,
    Dims,
    Kind,
    Step,
    is_fixed,
    kinds_of,
    made,
    regrouped,
    size_of,
    whole,
)
from trocar_server.surgery.axes.combining import broadcast, combined
from trocar_server.surgery.axes.operation import Operation, dims_of, fixed, unknown

Rule = Callable[[Operation], Sequence[Dims]]
"""Returns the dimensions of each output."""


def changed(dim: Dim, size: int, step: Step) -> Dim:
    """Return the dimension after an operation along it that changes its length."""
    if size == 1:
        return ()
    if not dim or is_fixed(dim):
        return made(Kind.FIXED, size)
    kinds = kinds_of(dim)
    if kinds == {Kind.CHANNELS}:
        return made(Kind.CHANNELS, size)
    if len(dim) == 1 and dim[0].is_whole:
        axis = dim[0].axis.real
        if axis.kind in (Kind.NAMED, Kind.JOINED, Kind.BATCH):
            kind = Kind.NAMED if axis.kind is Kind.JOINED else axis.kind
            return whole(Axis(kind, size, axis.name or _name_of_parts(axis), source=axis, step=step))
    named = [digit.axis.real for digit in dim if digit.kind in (Kind.NAMED, Kind.JOINED)]
    if named and Kind.BATCH not in kinds and Kind.UNKNOWN not in kinds:
        return whole(Axis(Kind.NAMED, size, named[0].name, source=named[0], step=Step("mixed")))
    return made(Kind.UNKNOWN, size)


def _name_of_parts(axis: Axis) -> str:
    names = [digit.axis.real.name for part in axis.parts for digit in part if digit.axis.real.name]
    return names[0] if names else ""


def same(op: Operation) -> Sequence[Dims]:
    """As the first tensor, where the lengths are."""
    return [dims_of(op.inputs[0])] * len(op.outputs)


def elementwise(op: Operation) -> Sequence[Dims]:
    """As all tensors together, by NumPy's rules."""
    dims = [dims_of(tensor) for tensor in op.inputs]
    return [broadcast(dims, output.shape) for output in op.outputs]


def constant(op: Operation) -> Sequence[Dims]:
    """The same for every input."""
    return [fixed(output.shape) for output in op.outputs]


def view(op: Operation) -> Sequence[Dims]:
    """Other dimensions of the same elements in the same order."""
    shape = op.outputs[0].shape
    return [regrouped(dims_of(op.inputs[0]), shape) or unknown(shape)]


def permute(op: Operation) -> Sequence[Dims]:
    """Dimensions in another order."""
    dims = op.dims()
    return [tuple(dims[place] for place in op.argument("dims"))]


def transpose(op: Operation) -> Sequence[Dims]:
    """Two dimensions change places; of `t` the only two."""
    dims = list(op.dims())
    if len(dims) > 1:
        first, second = (op.argument("dim0", 0), op.argument("dim1", -1)) if op.name != "t" else (0, -1)
        dims[first], dims[second] = dims[second], dims[first]
    return [tuple(dims)]


def unsqueeze(op: Operation) -> Sequence[Dims]:
    """A new dimension of one element."""
    dims = list(op.dims())
    dims.insert(int(op.argument("dim")) % (len(dims) + 1), ())
    return [tuple(dims)]


def squeeze(op: Operation) -> Sequence[Dims]:
    """Without dimensions of one element."""
    dropped = [place for place in op.dim_list() if op.inputs[0].shape[place] == 1]
    return [tuple(dim for place, dim in enumerate(op.dims()) if place not in dropped)]


def expand(op: Operation) -> Sequence[Dims]:
    """New dimensions, and longer ones of repeated elements."""
    shape, dims = op.outputs[0].shape, op.dims()
    dims = (*[()] * (len(shape) - len(dims)), *dims)
    pairs = zip(dims, shape, strict=True)
    return [tuple(dim if size_of(dim) == size else made(Kind.FIXED, size) for dim, size in pairs)]


def repeat(op: Operation) -> Sequence[Dims]:
    """Each dimension so many times in a row."""
    shape, dims = op.outputs[0].shape, op.dims()
    dims = (*[()] * (len(shape) - len(dims)), *dims)
    result = []
    for dim, size in zip(dims, shape, strict=True):
        count = size // max(size_of(dim), 1)
        kinds = kinds_of(dim)
        if count == 1:
            result.append(dim)
        elif not dim or is_fixed(dim) or kinds == {Kind.CHANNELS}:
            result.append(made(Kind.CHANNELS if kinds == {Kind.CHANNELS} else Kind.FIXED, size))
        else:
            result.append((*made(Kind.FIXED, count), *dim))
    return [tuple(result)]


def select(op: Operation) -> Sequence[Dims]:
    """Without one dimension."""
    dropped = op.dim_argument()
    dims = op.dims()
    op.mix(dims[dropped])
    rest = tuple(dim for place, dim in enumerate(dims) if place != dropped)
    return [without(dims[dropped], rest)] * len(op.outputs)


def without(dropped: Dim, rest: Dims) -> Dims:
    """Return dimensions after one index of a dropped one: channels split with it are whole again."""
    axes = {digit.axis.real for digit in dropped if digit.kind is Kind.CHANNELS}
    if not axes:
        return rest
    for axis in axes:
        digits = sorted(
            {digit for dim in rest for digit in dim if digit.axis.real is axis}, key=lambda d: d.stride
        )
        stride, renamed = 1, {}
        new = Axis(Kind.CHANNELS, _product(digits))
        for digit in digits:
            renamed[digit] = Digit(new, stride, digit.size)
            stride *= digit.size
        rest = tuple(tuple(renamed.get(digit, digit) for digit in dim) for dim in rest)
    return rest


def _product(digits: Sequence[Digit]) -> int:
    size = 1
    for digit in digits:
        size *= digit.size
    return size


def slice_(op: Operation) -> Sequence[Dims]:
    """A part of one dimension; of a joined one the parts that it has whole."""
    place, dims = op.dim_argument(), list(op.dims())
    size, whole_size = op.outputs[0].shape[place], op.inputs[0].shape[place]
    if size != whole_size:
        start, stop = op.argument("start") or 0, op.argument("end")
        step = op.argument("step", 1)
        op.mix(dims[place])
        dims[place] = cut(dims[place], start, stop, step, size)
    return [tuple(dims)]


def cut(dim: Dim, start: int, stop: int | None, step: int, size: int) -> Dim:
    """Return what remains of a dimension by a slice."""
    length = size_of(dim)
    first, last, _ = slice(start, stop, step).indices(length)
    if len(dim) == 1 and dim[0].is_whole and dim[0].axis.real.kind is Kind.JOINED and step == 1:
        parts = _parts_within(dim[0].axis.real, first, last)
        if parts is not None:
            return joined(parts)
    numbers = (start, 0 if stop is None or stop >= length else stop, step)
    return changed(dim, size, Step("slice", numbers))


def _parts_within(axis: Axis, first: int, last: int) -> list[Dim] | None:
    """Return the parts of a joined axis from one place to another; None where these are within parts."""
    parts, place = [], 0
    for part in axis.parts:
        end = place + size_of(part)
        if place < first < end or place < last < end:
            if is_fixed(part) or kinds_of(part) == {Kind.CHANNELS}:
                length = min(end, last) - max(place, first)
                parts.append(made(next(iter(kinds_of(part))), length))
                place = end
                continue
            return None
        if first <= place and end <= last:
            parts.append(part)
        place = end
    return parts


def joined(parts: Sequence[Dim]) -> Dim:
    """Return the dimension that parts one after the other are."""
    size = sum(map(size_of, parts))
    if size == 1:
        return ()
    if len(parts) == 1:
        return parts[0]
    kinds = set().union(*map(kinds_of, parts)) or {Kind.FIXED}
    if kinds <= {Kind.FIXED}:
        return made(Kind.FIXED, size)
    if kinds <= {Kind.CHANNELS, Kind.FIXED}:
        return made(Kind.CHANNELS, size)
    flat: list[Dim] = []
    for part in parts:
        is_joined = len(part) == 1 and part[0].is_whole and part[0].axis.real.kind is Kind.JOINED
        flat += part[0].axis.real.parts if is_joined else [part]
    return whole(Axis(Kind.JOINED, size, parts=tuple(flat)))


def split(op: Operation) -> Sequence[Dims]:
    """Parts of one dimension, one after the other."""
    place, dims, start, result = op.dim_argument(), op.dims(), 0, []
    for output in op.outputs:
        size = output.shape[place]
        own = cut(dims[place], start, start + size, 1, size) if size != size_of(dims[place]) else dims[place]
        result.append((*dims[:place], own, *dims[place + 1 :]))
        start += size
    return result


def cat(op: Operation) -> Sequence[Dims]:
    """Tensors one after the other along one dimension."""
    output = op.outputs[0]
    live = [tensor for tensor in op.inputs if tensor.dim() == output.dim()]
    place = int(op.argument("dim", 0)) % max(output.dim(), 1)
    every = [dims_of(tensor) for tensor in live]
    result = []
    for other, size in enumerate(output.shape):
        columns = [dims[other] for dims in every]
        if other == place:
            op.mix(*columns)
            present = [dim for dim, tensor in zip(columns, live, strict=True) if tensor.shape[other]]
            result.append(joined(present))
        else:
            result.append(combined(columns, size))
    return [tuple(result)]


def stack(op: Operation) -> Sequence[Dims]:
    """Tensors along a new dimension."""
    output = op.outputs[0]
    place = int(op.argument("dim", 0)) % output.dim()
    sizes = [size for other, size in enumerate(output.shape) if other != place]
    columns = list(zip(*(dims_of(tensor) for tensor in op.inputs), strict=True))
    rest = [combined(column, size) for column, size in zip(columns, sizes, strict=True)]
    rest.insert(place, made(Kind.FIXED, output.shape[place]))
    return [tuple(rest)]


def index(op: Operation) -> Sequence[Dims]:
    """Positions given by tensors of whole numbers."""
    dims, indices = op.dims(), op.argument("indices")
    indices = [*indices, *[None] * (len(dims) - len(indices))]
    if any(i is not None and i.dtype.itemsize == 1 for i in indices):  # masks: lengths depend on the data
        return [unknown(op.outputs[0].shape)]
    given = [i for i in indices if i is not None]
    places = [place for place, i in enumerate(indices) if i is not None]
    shape = op.outputs[0].shape
    rank = max(i.dim() for i in given)
    are_neighbours = places == list(range(places[0], places[0] + len(places)))
    at = places[0] if are_neighbours else 0
    own = list(broadcast([dims_of(i) for i in given], shape[at : at + rank]))
    if len(given) == 1 and rank == 1 and is_fixed(own[0]):
        own[0] = changed(dims[places[0]], shape[at], Step("mixed"))
    rest = [dim for dim, i in zip(dims, indices, strict=True) if i is None]
    return [(*rest[:at], *own, *rest[at:])]


def index_select(op: Operation) -> Sequence[Dims]:
    """Positions of one dimension given by one tensor."""
    place, dims, output = op.dim_argument(), op.dims(), op.outputs[0]
    given = dims_of(op.argument("index"))
    own = given[0] if given and not is_fixed(given[0]) else None
    size = output.shape[place]
    mixed = changed(dims[place], size, Step("mixed"))
    return [(*dims[:place], mixed if own is None else own, *dims[place + 1 :])]


def gather(op: Operation) -> Sequence[Dims]:
    """One element for each position of an index."""
    place, dims, given = op.dim_argument(), op.dims(), dims_of(op.argument("index"))
    result = []
    for other, (own, dim, size) in enumerate(zip(given, dims, op.outputs[0].shape, strict=True)):
        if other == place:
            result.append(changed(dim, size, Step("mixed")) if is_fixed(own) else own)
        else:
            result.append(combined([own, dim] if size_of(dim) == size else [own], size))
    return [tuple(result)]


def pad(op: Operation) -> Sequence[Dims]:
    """More elements at both ends of the last dimensions."""
    dims, given, shape = list(op.dims()), op.argument("pad") or op.argument("padding"), op.outputs[0].shape
    for number in range(len(given) // 2):
        place = len(dims) - 1 - number
        before, after = given[2 * number : 2 * number + 2]
        if before or after:
            dims[place] = changed(dims[place], shape[place], Step("pad", (before, after)))
    return [tuple(dims)]


def moved(op: Operation) -> Sequence[Dims]:
    """Positions that move along their dimensions: `roll` and `flip`."""
    dims, places = list(op.dims()), op.dim_list("dims")
    shifts = op.argument("shifts", [0] * len(places))
    for place, shift in zip(places, [shifts] if isinstance(shifts, int) else shifts, strict=False):
        op.mix(dims[place])
        if kinds_of(dims[place]) - {Kind.CHANNELS, Kind.FIXED, Kind.UNKNOWN}:
            step = Step("roll", (shift,)) if op.name == "roll" else Step("flip")
            dims[place] = changed(dims[place], size_of(dims[place]), step)
    return [tuple(dims)]


def unfold(op: Operation) -> Sequence[Dims]:
    """Windows along one dimension; the positions within each are the last dimension."""
    dims, output = list(op.dims()), op.outputs[0]
    place = op.dim_argument("dimension")
    op.mix(dims[place])
    kernel, stride = op.argument("size"), op.argument("step")
    dims[place] = changed(dims[place], output.shape[place], Step("window", (kernel, stride, 0, 1)))
    return [(*dims, made(Kind.FIXED, output.shape[-1]))]


RULES: dict[str, Rule] = {
    **dict.fromkeys(("view", "_unsafe_view", "reshape", "_reshape_alias", "view_copy"), view),
    **dict.fromkeys(("permute", "permute_copy"), permute),
    **dict.fromkeys(("transpose", "t"), transpose),
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
    **dict.fromkeys(("expand", "expand_copy"), expand),
    "repeat": repeat,
    **dict.fromkeys(("select", "unbind"), select),
    "slice": slice_,
    "narrow": slice_,
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unsafe_chunk", "unsafe_split"), split),
    "cat": cat,
    "stack": stack,
    "index": index,
    "index_select": index_select,
    "gather": gather,
    **dict.fromkeys(("constant_pad_nd", "reflection_pad1d", "reflection_pad2d", "replication_pad2d"), pad),
    **dict.fromkeys(("roll", "flip"), moved),
    "unfold": unfold,
}
