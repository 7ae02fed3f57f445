"""Memory estimate of an edit, for admission."""

import math
from collections.abc import Sequence

import torch

from trocar_server.tensors.edits.edit import Edit
from trocar_server.tensors.edits.edit_checks import resolve

_WIDE_BYTES = 8


def edit_bytes(edit: Edit, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the peak memory of applying an edit in bytes, besides the value and the operands.

    An upper bound: the result, the part in its own memory before and after, float64 temporaries, and
    converted operands. Random numbers are drawn on the CPU, but count all the same. Workspaces of kernels
    and tensors saved by autograd do not.

    Raises:
        ServiceError: `EDIT_SHAPE_MISMATCH` or `EDIT_DTYPE_REJECTED`, as `check_edit`.
    """
    selection = resolve(edit, tuple(shape), dtype)
    result_bytes = math.prod(shape) * dtype.itemsize
    part_count = math.prod(selection.signature.shape)
    wide_bytes = _WIDE_BYTES * (2 if dtype.is_complex else 1)
    part_bytes = part_count * (2 * dtype.itemsize + wide_bytes * edit.operation.wide_copies)
    mask_bytes = part_count * (dtype.itemsize + 1) if edit.region.tokens is not None else 0
    return result_bytes + part_bytes + mask_bytes + _constant_bytes(edit, wide_bytes)


def _constant_bytes(edit: Edit, wide_bytes: int) -> int:
    """Return the bytes of converted operands."""
    copies = edit.operation.operand_copies
    return sum(math.prod(spec.shape) * wide_bytes * copies for spec in edit.operands)
