"""Edit: an operation and the region of a value it applies to. Plain data, hashable, free of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from trocar_server.tensors.edits.base import Operation, require
from trocar_server.tensors.reductions import Axis, Index, OperandSpec, Positions, Spans, Take, TokenRows


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
    tokens: Spans | Positions | TokenRows | None = None

    def __post_init__(self) -> None:
        if self.mask is not None:
            require(self.index is None and not self.takes, "an edit has a mask or an index, not both")
            require(self.mask.dtype == torch.bool, "the mask of an edit must be bool")
        axes = [take.axis for take in self.takes]
        if self.tokens is not None:
            is_alone = replace(self, tokens=None).may_have_tokens
            require(is_alone, "tokens of a text go with channels and samples only")
        require(len(set(axes)) == len(axes), "positions are given twice for one dimension")
        for take in self.takes:
            is_distinct = len(set(take.positions)) == len(take.positions)
            require(is_distinct, f"{take} names a position twice; give each position once")

    @property
    def may_have_tokens(self) -> bool:
        """Whether nothing but channels and samples is selected, so that tokens may be."""
        takes_tokens = any(take.axis is Axis.TOKENS for take in self.takes)
        return self.index is None and self.mask is None and self.tokens is None and not takes_tokens

    @property
    def is_whole(self) -> bool:
        """Whether it is the full value."""
        return self == WHOLE


WHOLE = Region()


@dataclass(frozen=True)
class Gate:
    """A condition on each sample and token: the number that a direction reads at a place.

    Attributes:
        place: The name of the value that is read.
        vectors: Of shape (1, channels) there.
        bias: Of shape (1,).
        above: The number is above this; None for no limit.
        below: The number is below this; None for no limit.
    """

    place: str
    vectors: OperandSpec
    bias: OperandSpec
    above: float | None = None
    below: float | None = None

    def __post_init__(self) -> None:
        require(self.above is not None or self.below is not None, "a gate needs above, below or both")

    def is_open(self, value: torch.Tensor, operands: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return where the condition holds, (samples, tokens), of a value (samples, tokens, channels).

        Args:
            value: What is read.
            operands: Vectors and bias.
        """
        dtype = torch.promote_types(value.dtype, torch.float32)
        vectors, bias = (tensor.to(value.device, dtype) for tensor in operands)
        numbers = torch.nn.functional.linear(value.to(dtype), vectors, bias)[..., 0]
        result = torch.ones_like(numbers, dtype=torch.bool)
        if self.above is not None:
            result &= numbers > self.above
        if self.below is not None:
            result &= numbers < self.below
        return result


@dataclass(frozen=True)
class Edit:
    """An operation and its region of a value.

    Attributes:
        operation: The operation.
        region: The part that it changes.
        channel_dim: Channel dimension of the value; None for the default of the rank.
        samples_dim: Dimension of the samples; None for a value without any.
        gate: A condition on each token; None for none.
    """

    operation: Operation
    region: Region = WHOLE
    channel_dim: int | None = None
    samples_dim: int | None = 0
    gate: Gate | None = None

    def __post_init__(self) -> None:
        if not self.operation.is_on_values:
            problem = f"{self.operation} takes the whole call; leave the index out"
            require(self.region.is_whole, problem)

    @property
    def operands(self) -> tuple[OperandSpec, ...]:
        """The tensors of the request, in the order of their payloads: its own, then the gate's."""
        return (
            self.own_operands
            if self.gate is None
            else (*self.own_operands, self.gate.vectors, self.gate.bias)
        )

    @property
    def own_operands(self) -> tuple[OperandSpec, ...]:
        """The tensors without the tensors of the gate: a mask, then the operation's own."""
        mask = () if self.region.mask is None else (self.region.mask,)
        return (*mask, *self.operation.operands())
