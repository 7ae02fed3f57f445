"""Whether an edit fits a value, told from the value's form before anything is computed."""

from collections.abc import Sequence

import torch

from trocar_server.edits.base import Operation
from trocar_server.edits.dtypes import need_lossless
from trocar_server.edits.edit import Edit
from trocar_server.edits.form import Form, broadcasts_to
from trocar_server.edits.operands import check_operation
from trocar_server.edits.operation import AddInput, Skip, Swap
from trocar_server.edits.region import Selection, select, whole_form
from trocar_server.reductions import dtype_name

_REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_COMPLEX = (torch.complex64, torch.complex128)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_EDITABLE = (*_REAL, *_COMPLEX, *_INTEGERS, torch.bool)


def check_edit(
    edit: Edit,
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    other_shape: Sequence[int] | None = None,
    other_dtype: torch.dtype | None = None,
) -> None:
    """Check that an edit fits a value of this form.

        check_edit(Edit(Scale(0.5)), (8, 64, 56, 56), torch.float32)

    Args:
        edit: What is to be done.
        shape: Of the whole value.
        dtype: Of the value.
        other_shape: Of the value from elsewhere for a swap, of the module's input for `add_input` and
            `skip`; not checked when None.
        other_dtype: Of the same; not checked when None.

    Raises:
        ServiceError: `EDIT_SHAPE_MISMATCH` or `EDIT_DTYPE_REJECTED`, with what would fit.
    """
    resolve(edit, tuple(shape), dtype, other_shape, other_dtype)


def resolve(
    edit: Edit,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    other_shape: Sequence[int] | None = None,
    other_dtype: torch.dtype | None = None,
) -> Selection:
    """Check as `check_edit` does, and return the part that the edit is for."""
    whole = whole_form(edit, shape, dtype)
    _check_dtype(edit.operation, whole)
    selection = select(edit.region, whole)
    mask = edit.region.mask
    if mask is not None and not broadcasts_to(mask.shape, shape):
        raise whole.mismatch(f"a mask of shape {mask.shape} is not broadcast to that; give that shape")
    check_operation(selection.form, edit.operation)
    if other_shape is not None:
        _check_other_shape(edit.operation, whole, tuple(other_shape))
    if other_dtype is not None:
        _check_other_dtype(edit.operation, whole, other_dtype)
    return selection


def _check_dtype(operation: Operation, form: Form) -> None:
    if isinstance(operation, Skip):  # nothing is computed
        return
    if form.dtype not in _EDITABLE:
        raise form.rejection(
            f"values of {dtype_name(form.dtype)} cannot be edited; edit one before or after it"
        )
    if form.dtype == torch.bool and not operation.takes_booleans:
        raise form.rejection("booleans can be set, zeroed, resampled or swapped; edit a value of floats")
    if form.dtype in _INTEGERS and not operation.takes_integers:
        raise form.rejection("it makes no sense for integers; set, add, scale or clamp these")
    if form.dtype in _COMPLEX and not operation.takes_complex:
        raise form.rejection("complex numbers have no order and no cast; edit a value of real numbers")


def _check_other_shape(operation: Operation, whole: Form, found: tuple[int, ...]) -> None:
    if isinstance(operation, Swap):
        is_one_sample = whole.shape != () and found == (1, *whole.shape[1:])
        if found != whole.shape and not is_one_sample:
            raise whole.mismatch(
                f"the other value is of shape {found}; take one of that shape, or a batch of 1"
            )
    elif isinstance(operation, AddInput | Skip) and found != whole.shape:
        raise whole.mismatch(f"the module's input is of shape {found}; edit a module that keeps the shape")


def _check_other_dtype(operation: Operation, whole: Form, found: torch.dtype) -> None:
    if isinstance(operation, Skip) and found != whole.dtype:
        raise whole.rejection(f"the input is {dtype_name(found)}; skip a module that keeps the dtype")
    if isinstance(operation, Swap | AddInput):
        need_lossless(whole, found)
