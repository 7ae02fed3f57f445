"""Operations on each element: set, zero, add, scale, affine, clamp, nan_to_num, swap, add_input.

Note: [A replaced value stays in the graph]
    Behind a value that was set, the gradient with respect to what was there before is 0, not missing. So
    one request can set a value and ask for gradients on both sides of it, and a part that is set behaves
    like the whole. `torch.where` with a condition that is never true does this in one pass over memory, and
    takes the memory layout from the value because that comes first. NaN does not spread, as it would
    through `value * 0`.
"""

import torch

from trocar_server.edits.dtypes import as_number
from trocar_server.edits.operation import (
    Add,
    AddInput,
    Affine,
    Clamp,
    NanToNum,
    Scale,
    Set,
    Swap,
    Zero,
)
from trocar_server.edits.part import Part


def replace(part: Part, wanted: Set) -> torch.Tensor:
    """Return the number or tensor everywhere."""
    (new,) = part.operands(wanted.value)
    return part.replaced(new)


def zero(part: Part, wanted: Zero) -> torch.Tensor:
    """Return zeros, where NaN was too."""
    return part.replaced(as_number(0, part.value.dtype))


def add(part: Part, wanted: Add) -> torch.Tensor:
    """Return x + value; integers wrap around as torch's do."""
    (shift,) = part.operands(wanted.value)
    return part.value + shift


def scale(part: Part, wanted: Scale) -> torch.Tensor:
    """Return x * factor; 0 times NaN or infinity is NaN."""
    (factor,) = part.operands(wanted.factor)
    return part.value * factor


def affine(part: Part, wanted: Affine) -> torch.Tensor:
    """Return x * scale + shift, rounded twice, in the memory of one result."""
    factor, shift = part.operands(wanted.scale, wanted.shift)
    return (part.value * factor).add_(shift)


def clamp(part: Part, wanted: Clamp) -> torch.Tensor:
    """Return x limited to [low, high]; NaN stays NaN."""
    ends = [None if end is None else as_number(end, part.value.dtype) for end in (wanted.low, wanted.high)]
    return part.value.clamp(*ends)


def nan_to_num(part: Part, wanted: NanToNum) -> torch.Tensor:
    """Return x with numbers instead of NaN and infinities."""
    return part.value.nan_to_num(wanted.nan, wanted.posinf, wanted.neginf)


def swap(part: Part, wanted: Swap) -> torch.Tensor:
    """Return the other value's part."""
    return part.replaced(part.need_other())


def add_input(part: Part, wanted: AddInput) -> torch.Tensor:
    """Return output + input."""
    return part.value + part.need_other()
