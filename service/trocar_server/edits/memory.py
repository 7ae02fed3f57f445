"""The memory that an edit needs, for admission."""

import math
from collections.abc import Sequence

import torch

from trocar_server.edits.base import Operation
from trocar_server.edits.checking import resolve
from trocar_server.edits.edit import Edit
from trocar_server.edits.operation import (
    Cast,
    Dropout,
    MeanAblate,
    Noise,
    Normalise,
    Project,
    ProjectOnto,
    Steer,
    TopK,
)

_WIDE_BYTES = 8

_WIDE_COPIES: dict[type[Operation], int] = {
    Noise: 2,
    Dropout: 1,
    MeanAblate: 1,
    TopK: 3,
    Cast: 5,
    Steer: 5,
    Normalise: 4,
    Project: 4,
    ProjectOnto: 4,
}
"""How many tensors of the part's size in float64, at most, an operation holds beside its result."""


def edit_bytes(edit: Edit, shape: Sequence[int], dtype: torch.dtype) -> int:
    """Return the most bytes that applying an edit holds at once beside the value and the constants.

    An upper bound: the result, the part in its own memory before and after, what the operation computes in
    float64, and converted constants. Random numbers are drawn on the CPU, but count all the same;
    workspaces of kernels and what autograd keeps do not.

    Raises:
        ServiceError: `EDIT_SHAPE_MISMATCH` or `EDIT_DTYPE_REJECTED`, as `check_edit`.
    """
    selection = resolve(edit, tuple(shape), dtype)
    result_bytes = math.prod(shape) * dtype.itemsize
    part_count = math.prod(selection.form.shape)
    wide_bytes = _WIDE_BYTES * (2 if dtype.is_complex else 1)
    part_bytes = part_count * (2 * dtype.itemsize + wide_bytes * _WIDE_COPIES.get(type(edit.operation), 0))
    return result_bytes + part_bytes + _constant_bytes(edit, wide_bytes)


def _constant_bytes(edit: Edit, wide_bytes: int) -> int:
    """Return the bytes of constants as they are converted; a basis is decomposed, in float64."""
    copies = 6 if isinstance(edit.operation, Project) else 2
    return sum(math.prod(spec.shape) * wide_bytes * copies for spec in edit.constants)
