"""Region: the elements of a value that an edit applies to, gathered into a tensor and scattered back."""

from dataclasses import dataclass, replace
from types import EllipsisType

import torch

from trocar_server.tensors.edits.edit import Edit, Region
from trocar_server.tensors.edits.value_signature import ValueSignature
from trocar_server.tensors.reductions import Axis, Index, Positions, Slice, Spans, Take, TokenRows


@dataclass(frozen=True)
class Selection:
    """Selected elements of a value of known shape.

    Attributes:
        signature: Signature of the part, the operation's input.
        items: For each dimension of the value, a position or a slice.
        takes: Positions, from 0, in dimensions of the result of `items`. Together they are an outer product,
        as of `np.ix_`.
        rows: Tokens of each sample at which an edit's result is used; None for all.
    """

    signature: ValueSignature
    items: tuple[int | slice, ...]
    takes: tuple[tuple[int, tuple[int, ...]], ...]
    rows: TokenRows | None = None

    @property
    def kept(self) -> list[int]:
        """The dimension of the value of each dimension of the part."""
        return [dim for dim, item in enumerate(self.items) if isinstance(item, slice)]

    def read(self, value: torch.Tensor) -> torch.Tensor:
        """Return the part; it may share the value's memory."""
        view = value[self.items]
        if not self.takes:
            return view
        order = self._order(view.ndim)
        inverse = [order.index(dim) for dim in range(view.ndim)]
        return view.permute(order)[self._grid(value.device)].permute(inverse)

    def write(self, value: torch.Tensor, part: torch.Tensor) -> None:
        """Write a part into a value, in place."""
        view = value[self.items]
        if self.takes:
            order = self._order(view.ndim)
            view.permute(order)[self._grid(value.device)] = part.permute(order)
        else:
            view.copy_(part)

    def limited(self, value: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        """Return an edited part, with the value's own elements at tokens that are not selected."""
        if self.rows is None:
            return part
        is_edited = torch.zeros(value.shape[:2], dtype=torch.bool)
        for sample, positions in enumerate(self.rows.rows):
            is_edited[sample, list(positions)] = True
        chosen = self.read(is_edited[:, :, None].to(value.device).expand(value.shape))
        return torch.where(chosen, part, self.read(value))

    def _order(self, rank: int) -> list[int]:
        """Return the dimensions of takes, then the others: indexing in torch then keeps the order."""
        taken = [dim for dim, _ in self.takes]
        return [*taken, *(dim for dim in range(rank) if dim not in taken)]

    def _grid(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Return one index per take; together they broadcast to the outer product."""
        count = len(self.takes)
        return tuple(
            torch.tensor(positions, device=device).reshape([-1] + [1] * (count - 1 - place))
            for place, (_, positions) in enumerate(self.takes)
        )


def whole_signature(edit: Edit, shape: tuple[int, ...], dtype: torch.dtype) -> ValueSignature:
    """Return a value's signature, with samples and channels as the edit has them.

    Raises:
        ServiceError: `EDIT_SHAPE_MISMATCH`, the value has no such channel dimension.
    """
    rank = len(shape)
    signature = ValueSignature(str(edit.operation), shape, dtype, samples=None, channels=None)
    if edit.samples_dim is not None and edit.samples_dim < rank:
        signature = replace(signature, samples=edit.samples_dim)
    if edit.channel_dim is None:
        default = {0: None, 1: 0, 3: 2}.get(rank, 1)
        return replace(signature, channels=default)
    if not -rank <= edit.channel_dim < rank:
        raise signature.mismatch(
            f"dimension {edit.channel_dim} does not exist; give channel_dim within its {rank}"
        )
    return replace(signature, channels=edit.channel_dim % rank)


def select(region: Region, whole: ValueSignature) -> Selection:
    """Resolve a region's index and positions for a value's signature; a mask selects all.

    Raises:
        ServiceError: `EDIT_SHAPE_MISMATCH`, there is no such dimension or position, or two takes of one.
    """
    _check_tokens(region.tokens, whole)
    items = _items(region.index, whole)
    sizes = {
        dim: len(range(*item.indices(whole.shape[dim])))
        for dim, item in enumerate(items)
        if isinstance(item, slice)
    }
    kept = list(sizes)
    takes: dict[int, tuple[int, ...]] = {}
    for take in region.takes:
        dim = _whole_dim(take, whole, items)
        if dim in takes:
            raise whole.mismatch(f"positions are given twice for dimension {dim}; give them once")
        takes[dim] = _positions(take, dim, whole)
        sizes[dim] = len(takes[dim])
    signature = replace(
        whole,
        shape=tuple(sizes.values()),
        samples=_place(whole.samples, kept),
        channels=_place(whole.channels, kept),
    )
    return Selection(
        signature,
        items,
        tuple((kept.index(dim), positions) for dim, positions in takes.items()),
        region.tokens if isinstance(region.tokens, TokenRows) else None,
    )


def _check_tokens(tokens: Spans | Positions | TokenRows | None, whole: ValueSignature) -> None:
    """Refuse tokens of texts of a value that has others. Until the texts are tokenized, any number fits."""
    if tokens is None:
        return
    _need_tokens(whole)
    if isinstance(tokens, TokenRows) and tokens.is_from_end:
        _check_last(tokens, whole)
    elif isinstance(tokens, TokenRows) and whole.shape[:2] != (len(tokens.rows), tokens.token_count):
        raise whole.mismatch(
            f"the texts are {len(tokens.rows)} of {tokens.token_count} tokens, and the value has "
            "others; for a decoder's own texts write decoder=True in the span"
        )


def _check_last(tokens: TokenRows, whole: ValueSignature) -> None:
    count = whole.shape[1]
    least = min(position for row in tokens.rows for position in row)
    if least < -count:
        place = tokens.token_count + least
        raise whole.mismatch(
            f"it has the last {count} of {tokens.token_count} tokens, and position {place} is not among "
            "them; edit the value at all positions with `extract` or `gradients` on the text"
        )


def _place(dim: int | None, kept: list[int]) -> int | None:
    return kept.index(dim) if dim in kept else None


def _items(index: Index | None, whole: ValueSignature) -> tuple[int | slice, ...]:
    """Return one item for each dimension, positions checked and slices within the bounds."""
    given: tuple[int | Slice | EllipsisType, ...] = () if index is None else index.items
    given = given if ... in given else (*given, ...)
    missing = len(whole.shape) - (len(given) - 1)
    if missing < 0:
        raise whole.mismatch(f"{index} has more items than there are dimensions; give fewer")
    filled: list[int | Slice] = []
    for item in given:
        filled += [Slice()] * missing if isinstance(item, EllipsisType) else [item]
    return tuple(_item(item, dim, whole) for dim, item in enumerate(filled))


def _item(item: int | Slice, dim: int, whole: ValueSignature) -> int | slice:
    size = whole.shape[dim]
    if isinstance(item, int):
        return _position(item, dim, whole)
    # Within the bounds, because torch adds them up in 64 bits.
    start, stop, step = slice(item.start, item.stop, item.step).indices(size)
    return slice(start, max(start, stop), min(step, max(size, 1)))


def _position(position: int, dim: int, whole: ValueSignature) -> int:
    size = whole.shape[dim]
    if not -size <= position < size:
        problem = f"position {position} is not among the {size:,} of dimension {dim}, 0 to {size - 1:,}"
        raise whole.mismatch(problem)
    return position % size


def _positions(take: Take, dim: int, whole: ValueSignature) -> tuple[int, ...]:
    positions = tuple(_position(position, dim, whole) for position in take.positions)
    if len(set(positions)) < len(positions):
        raise whole.mismatch(f"{take} names a position of dimension {dim} twice; give each position once")
    return positions


def _whole_dim(take: Take, whole: ValueSignature, items: tuple[int | slice, ...]) -> int:
    """Return the dimension of a take, which the index must leave in full."""
    dim = _axis_dim(take, whole)
    item = items[dim]
    if isinstance(item, int) or len(range(*item.indices(whole.shape[dim]))) < whole.shape[dim]:
        raise whole.mismatch(
            f"{take} and the index both select of dimension {dim}; put a full slice ':' into the index there"
        )
    return dim


def _axis_dim(take: Take, whole: ValueSignature) -> int:
    if take.axis is Axis.CHANNELS:
        return whole.need_channels()
    if take.axis is Axis.SAMPLES:
        return whole.need_samples()
    _need_tokens(whole)
    return 1


def _need_tokens(whole: ValueSignature) -> None:
    if len(whole.shape) != 3 or whole.channels == 1 or whole.samples not in (0, None):
        raise whole.mismatch(
            "tokens are dimension 1 of (batch, tokens, width); use an index for other values"
        )
