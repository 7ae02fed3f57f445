"""Elementwise operations: set, zero, add, scale, affine, clamp, nan_to_num.

Note: [A replaced value stays in the graph]
    After a value was set, the gradient with respect to the original value is 0, not missing. So one request
    can set a value and request gradients on both sides of it, and setting a part behaves like setting all.
    `torch.where` with a condition that is never true does this in one pass over memory, and takes the
    memory layout from the value because that is its first argument. NaN does not spread, as it would
    through `value * 0`.
"""

from dataclasses import dataclass

import torch

from trocar_server.tensors.edits.base import Operation, require
from trocar_server.tensors.edits.part import Operand, Part
from trocar_server.tensors.edits.value_dtypes import as_number, need_operands
from trocar_server.tensors.edits.value_signature import ValueSignature


@dataclass(frozen=True)
class Set(Operation):
    """Replaces the part."""

    name = "set"
    takes_integers = True
    takes_booleans = True
    value: Operand

    def check(self, part: ValueSignature) -> None:
        """Check that the number or tensor fits."""
        need_operands(part, self.value)

    def apply(self, part: Part) -> torch.Tensor:
        """Return the number or tensor in place of every element."""
        (new,) = part.operands(self.value)
        return part.replaced(new)


@dataclass(frozen=True)
class Zero(Operation):
    """Replaces the part by zeros."""

    name = "zero"
    takes_integers = True
    takes_booleans = True

    def apply(self, part: Part) -> torch.Tensor:
        """Return zeros, in place of NaN too."""
        return part.replaced(as_number(0, part.value.dtype))


@dataclass(frozen=True)
class Add(Operation):
    """x + value."""

    name = "add"
    takes_integers = True
    value: Operand

    def check(self, part: ValueSignature) -> None:
        """Check that the number or tensor fits."""
        need_operands(part, self.value)

    def apply(self, part: Part) -> torch.Tensor:
        """Return x + value; integers wrap around as torch's do."""
        (shift,) = part.operands(self.value)
        return part.value + shift


@dataclass(frozen=True)
class Scale(Operation):
    """x * factor."""

    name = "scale"
    takes_integers = True
    factor: Operand

    def check(self, part: ValueSignature) -> None:
        """Check that the number or tensor fits."""
        need_operands(part, self.factor)

    def apply(self, part: Part) -> torch.Tensor:
        """Return x * factor; 0 times NaN or infinity is NaN."""
        (factor,) = part.operands(self.factor)
        return part.value * factor


@dataclass(frozen=True)
class Affine(Operation):
    """x * scale + shift."""

    name = "affine"
    scale: Operand = 1.0
    shift: Operand = 0.0

    def check(self, part: ValueSignature) -> None:
        """Check that the numbers or tensors fit."""
        need_operands(part, self.scale, self.shift)

    def apply(self, part: Part) -> torch.Tensor:
        """Return x * scale + shift, rounded twice, in the memory of one result."""
        factor, shift = part.operands(self.scale, self.shift)
        return (part.value * factor).add_(shift)


@dataclass(frozen=True)
class Clamp(Operation):
    """Limits each element to [low, high]; an end that is None is open."""

    name = "clamp"
    takes_integers = True
    takes_complex = False
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.low is not None or self.high is not None, "clamp needs `low`, `high` or both")
        if self.low is not None and self.high is not None:
            require(self.low <= self.high, f"clamp: low {self.low} is above high {self.high}")

    def check(self, part: ValueSignature) -> None:
        """Check that the ends are numbers of the dtype."""
        need_operands(part, self.low, self.high)

    def apply(self, part: Part) -> torch.Tensor:
        """Return x limited to [low, high]; NaN stays NaN."""
        ends = [None if end is None else as_number(end, part.value.dtype) for end in (self.low, self.high)]
        return part.value.clamp(*ends)


@dataclass(frozen=True)
class NanToNum(Operation):
    """As `torch.nan_to_num`."""

    name = "nan_to_num"
    takes_complex = False
    nan: float = 0.0
    posinf: float | None = None
    neginf: float | None = None

    def check(self, part: ValueSignature) -> None:
        """Check that the replacements are numbers of the dtype."""
        need_operands(part, self.nan, self.posinf, self.neginf)

    def apply(self, part: Part) -> torch.Tensor:
        """Return x with numbers instead of NaN and infinities."""
        return part.value.nan_to_num(self.nan, self.posinf, self.neginf)
