"""Edit: an operation and the region of a value it applies to. Plain data, hashable, free of tensors."""

from dataclasses import dataclass

import torch

from trocar_server.tensors.edits.base import Operation, require
from trocar_server.tensors.reductions import Axis, Index, OperandSpec, Spans, Take, TokenRows


@dataclass(frozen=True)
class Region:
    """The part of a value that an edit changes.

    Attributes:
        index: NumPy's basic indexing, or None for all.
        takes: Positions of dimensions that the index leaves in full, each dimension once.
        mask: Shape and dtype of a bool tensor that is broadcast to the value; without index and takes.
        tokens: Tokens of texts at which the result is used, of the samples and channels of the takes; without
        index, mask and positions of tokens.
    """

    index: Index | None = None
    takes: tuple[Take, ...] = ()
    mask: OperandSpec | None = None
    tokens: Spans | TokenRows | None = None

    def __post_init__(self) -> None:
        if self.mask is not None:
            require(self.index is None and not self.takes, "an edit has a mask or an index, not both")
            require(self.mask.dtype == torch.bool, "the mask of an edit must be bool")
        axes = [take.axis for take in self.takes]
        if self.tokens is not None:
            is_alone = self.index is None and self.mask is None and Axis.TOKENS not in axes
            require(is_alone, "tokens of a text go with channels and samples only")
        require(len(set(axes)) == len(axes), "positions are given twice for one dimension")
        for take in self.takes:
            is_distinct = len(set(take.positions)) == len(take.positions)
            require(is_distinct, f"{take} names a position twice; give each position once")

    @property
    def is_whole(self) -> bool:
        """Whether it is the full value."""
        return self == WHOLE


WHOLE = Region()


@dataclass(frozen=True)
class Edit:
    """An operation and its region of a value.

    Attributes:
        operation: The operation.
        region: The part that it changes.
        channel_dim: Channel dimension of the value; None for the default of the rank.
        samples_dim: Dimension of the samples; None for a value without any.
    """

    operation: Operation
    region: Region = WHOLE
    channel_dim: int | None = None
    samples_dim: int | None = 0

    def __post_init__(self) -> None:
        if not self.operation.is_on_values:
            problem = f"{self.operation} takes the whole call; leave the index out"
            require(self.region.is_whole, problem)

    @property
    def operands(self) -> tuple[OperandSpec, ...]:
        """The tensors of the request, in the order of their payloads: a mask, then the operation's own."""
        mask = () if self.region.mask is None else (self.region.mask,)
        return (*mask, *self.operation.operands())
