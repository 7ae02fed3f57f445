"""Edit validation against the signature of a value, before anything is computed."""

from collections.abc import Sequence

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.edits.base import Operation
from trocar_server.tensors.edits.edit import Edit
from trocar_server.tensors.edits.region import Selection, select, whole_signature
from trocar_server.tensors.edits.value_dtypes import extremes, limits_of
from trocar_server.tensors.edits.value_signature import ValueSignature, broadcasts_to
from trocar_server.tensors.reductions import dtype_name

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
    """Check that an edit fits a value of this shape and dtype.

        check_edit(Edit(Scale(0.5)), (8, 64, 56, 56), torch.float32)

    Args:
        edit: The edit.
        shape: Of the full value.
        dtype: Of the value.
        other_shape: Of the replacement for a swap, of the module's input for `add_input` and `skip`; not
        checked when None.
        other_dtype: Of the same; not checked when None.

    Raises:
        ServiceError: `EDIT_SHAPE_MISMATCH` or `EDIT_DTYPE_REJECTED`, with what would fit.
    """
    resolve(edit, tuple(shape), dtype, other_shape, other_dtype)


def check_operands(edit: Edit, operands: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
    """Reject a mask that selects nothing, and numbers out of range of a value's dtype.

    `edit_value` does not check them: that would synchronise with the device.

    Args:
        edit: An edit checked by `check_edit`.
        operands: Its tensors, finite, in the order of `edit.operands`.
        dtype: Of the value to edit.

    Raises:
        ServiceError: `EDIT_DTYPE_REJECTED`; `EDIT_SHAPE_MISMATCH`, for a mask.
    """
    if edit.region.mask is not None and not operands[0].any():
        raise ServiceError(
            ErrorReason.EDIT_SHAPE_MISMATCH,
            f"{edit.operation}: the mask is false everywhere, so nothing would be changed; select something",
        )
    if edit.operation.is_range_free:
        return
    low, high = limits_of(dtype)
    for operand in operands[edit.region.mask is not None : len(edit.own_operands)]:
        least, most = extremes(operand)
        if least < low or most > high:
            problem = f"numbers from {least} to {most} are not within {low} to {high}, those of its dtype"
            raise ServiceError(
                ErrorReason.EDIT_DTYPE_REJECTED,
                f"{edit.operation} does not fit a {dtype_name(dtype)} value: {problem}; give others",
            )


def selects_nothing(edit: Edit, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether a checked edit selects no element of a non-empty value."""
    return 0 in resolve(edit, tuple(shape), dtype).signature.shape and 0 not in shape


def mixed_dims(edit: Edit, shape: Sequence[int], dtype: torch.dtype) -> frozenset[int]:
    """Return the dimensions of a value along which a checked edit reads other places than it writes."""
    selection = resolve(edit, tuple(shape), dtype)
    kept = selection.kept
    return frozenset(kept[dim] for dim in edit.operation.mixed_dims(selection.signature))


def selected_dims(edit: Edit, shape: Sequence[int], dtype: torch.dtype) -> frozenset[int]:
    """Return the dimensions of which a checked edit changes some places, by index, positions or mask."""
    selection = resolve(edit, tuple(shape), dtype)
    kept = selection.kept
    dims = {kept[dim] for dim, _ in selection.takes}
    for dim, (item, size) in enumerate(zip(selection.items, shape, strict=True)):
        if isinstance(item, int) or len(range(*item.indices(size))) < size:
            dims.add(dim)
    mask = edit.region.mask
    first = len(shape) - (0 if mask is None else len(mask.shape))
    masked = () if mask is None else enumerate(mask.shape, first)
    return frozenset(dims | {dim for dim, size in masked if size > 1})


def resolve(
    edit: Edit,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    other_shape: Sequence[int] | None = None,
    other_dtype: torch.dtype | None = None,
) -> Selection:
    """Check as `check_edit` does, and return the part that the edit applies to."""
    whole = whole_signature(edit, shape, dtype)
    _check_dtype(edit.operation, whole)
    selection = select(edit.region, whole)
    mask = edit.region.mask
    if mask is not None and not broadcasts_to(mask.shape, shape):
        raise whole.mismatch(f"a mask of shape {mask.shape} cannot be broadcast to it; give that shape")
    edit.operation.check(selection.signature)
    other = None if other_shape is None else tuple(other_shape)
    edit.operation.check_other(whole, other, other_dtype)
    return selection


def _check_dtype(operation: Operation, signature: ValueSignature) -> None:
    if not operation.is_on_values:
        return
    if signature.dtype not in _EDITABLE:
        raise signature.rejection(
            f"values of {dtype_name(signature.dtype)} cannot be edited; edit one before or after it"
        )
    if signature.dtype == torch.bool and not operation.takes_booleans:
        raise signature.rejection("booleans can be set, zeroed, resampled or swapped; edit a value of floats")
    if signature.dtype in _INTEGERS and not operation.takes_integers:
        raise signature.rejection(
            "integers can only be set, added to, scaled or clamped; edit a value of floats"
        )
    if signature.dtype in _COMPLEX and not operation.takes_complex:
        raise signature.rejection("complex numbers have no order and no cast; edit a value of real numbers")
