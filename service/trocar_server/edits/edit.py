"""An edit: an operation and the part of a value that it is for. Plain data, hashable, free of tensors."""

from dataclasses import dataclass

import torch

from trocar_server.edits.base import Operation, require
from trocar_server.edits.operation import Skip
from trocar_server.reductions import ConstantSpec, Index, Take


@dataclass(frozen=True)
class Region:
    """Which part of a value is changed.

    Attributes:
        index: NumPy's basic indexing, or None for all.
        takes: Positions of dimensions that the index leaves whole, each dimension once.
        mask: The form of a bool tensor that is broadcast to the value; without index and takes.
    """

    index: Index | None = None
    takes: tuple[Take, ...] = ()
    mask: ConstantSpec | None = None

    def __post_init__(self) -> None:
        if self.mask is not None:
            require(self.index is None and not self.takes, "an edit has a mask or an index, not both")
            require(self.mask.dtype == torch.bool, "the mask of an edit is bool")
        axes = [take.axis for take in self.takes]
        require(len(set(axes)) == len(axes), "positions are given twice for one dimension")
        for take in self.takes:
            is_distinct = len(set(take.positions)) == len(take.positions)
            require(is_distinct, f"{take} names a position twice; an edit has each once")

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole value."""
        return self.index is None and not self.takes and self.mask is None


WHOLE = Region()


@dataclass(frozen=True)
class Edit:
    """An operation and the part of a value that it is for.

    Attributes:
        operation: What is done.
        region: To which part.
        channel_dim: Which dimension of the value holds the channels; None for the default of the rank.
    """

    operation: Operation
    region: Region = WHOLE
    channel_dim: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.operation, Skip):
            require(self.region.is_whole, "skip takes the whole call; leave the index out")

    @property
    def constants(self) -> tuple[ConstantSpec, ...]:
        """The tensors that come along, in the order of their payloads: a mask, then the operation's own."""
        mask = () if self.region.mask is None else (self.region.mask,)
        return (*mask, *self.operation.constants())
