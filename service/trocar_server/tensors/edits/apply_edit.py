"""Application of an edit to a value."""

from collections.abc import Sequence

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.edits.base import Operation
from trocar_server.tensors.edits.edit import Edit
from trocar_server.tensors.edits.edit_checks import resolve
from trocar_server.tensors.edits.part import Part
from trocar_server.tensors.edits.region import Selection
from trocar_server.tensors.edits.value_signature import ValueSignature


def edit_value(
    edit: Edit,
    value: torch.Tensor,
    operands: Sequence[torch.Tensor] = (),
    other: torch.Tensor | None = None,
    is_open: torch.Tensor | None = None,
) -> torch.Tensor:
    """Apply an edit to a value: returns a new tensor of its shape, dtype and memory layout.

        edit_value(Edit(Scale(0.0), Region(takes=(Take(Axis.CHANNELS, (1, 2)),))), feature_map)

    Arguments are not written to, and the result shares no memory with them: an in-place module may write
    into the result. Differentiable with respect to the value and the other one. On the meta device nothing
    is computed.

    Args:
        edit: The operation and its region. `skip` is not an operation on a value.
        value: A dense tensor on any device.
        operands: The tensors of `edit.operands`, in order, on any device; see `check_operands`.
        other: For a swap the replacement, of the full value's shape or with a batch of 1; for
        `add_input` the module's input; ignored by other operations.
        is_open: With a gate: where the result is used, broadcast to the value.

    Raises:
        ServiceError: `EDIT_SHAPE_MISMATCH` or `EDIT_DTYPE_REJECTED`, as `check_edit`.
        ValueError: `operands` are not those of the edit, there is no other value, or it is a skip.
    """
    other = other if edit.operation.takes_other else None
    _check_arguments(edit, value, operands, other)
    other_signature = (None, None) if other is None else (tuple(other.shape), other.dtype)
    selection = resolve(edit, tuple(value.shape), value.dtype, *other_signature)
    if value.is_meta or 0 in selection.signature.shape:
        return value.clone()
    operands = operands[: len(edit.own_operands)]
    edited = _edited(edit, selection, value, operands, other)
    return edited if is_open is None else _laid_out_as(value, torch.where(is_open, edited, value))


def _edited(
    edit: Edit,
    selection: Selection,
    value: torch.Tensor,
    operands: Sequence[torch.Tensor],
    other: torch.Tensor | None,
) -> torch.Tensor:
    if edit.region.mask is not None:
        edited = _applied(edit.operation, selection, value, operands[1:], other)
        return _laid_out_as(value, torch.where(operands[0].to(value.device), edited, value))
    edited = _applied(edit.operation, selection, value, operands, other)
    if edit.region.is_whole:
        return _laid_out_as(value, edited)
    result = value.clone()
    selection.write(result, selection.limited(value, edited))
    return result


def apply_operation(operation: Operation, value: torch.Tensor) -> torch.Tensor:
    """Apply an operation without tensors to a full value, unchecked: one that needs no dimension's meaning.

        apply_operation(Clamp(-0.1, 0.1), gradient)

    What torch makes of the numbers is the result: an end of a clamp may lie out of the dtype's range.
    """
    signature = ValueSignature(operation.name, tuple(value.shape), value.dtype, samples=None, channels=None)
    return operation.apply(Part(value, signature))


def _applied(
    operation: Operation,
    selection: Selection,
    value: torch.Tensor,
    operands: Sequence[torch.Tensor],
    other: torch.Tensor | None,
) -> torch.Tensor:
    """Apply the operation to the part."""
    own = None if other is None else selection.read(other.expand(value.shape))  # of a batch of 1
    part = Part(selection.read(value), selection.signature, tuple(operands), own)
    return operation.apply(part)


def _laid_out_as(value: torch.Tensor, edited: torch.Tensor) -> torch.Tensor:
    """Return `edited` in the memory layout of `torch.empty_like(value)`; copied only if needed."""
    if edited.stride() == value.stride():
        return edited
    wanted = torch.empty_like(value)
    pairs = zip(edited.stride(), wanted.stride(), value.shape, strict=True)
    is_same = all(own == like for own, like, size in pairs if size > 1)
    return edited if is_same else wanted.copy_(edited)


def _check_arguments(
    edit: Edit, value: torch.Tensor, operands: Sequence[torch.Tensor], other: torch.Tensor | None
) -> None:
    wanted = [(spec.dtype, spec.shape) for spec in edit.operands]
    given = [(tensor.dtype, tuple(tensor.shape)) for tensor in operands]
    if wanted != given:
        raise ValueError(f"operands are {given}, but {edit.operation} needs {wanted}")
    if not edit.operation.is_on_values:
        raise ValueError(f"{edit.operation} cannot be applied to a value; it keeps the module from running")
    if other is None and edit.operation.takes_other:
        raise ValueError(f"{edit.operation} needs another value")
    for tensor in (value,) if other is None else (value, other):
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            problem = f"{edit.operation} takes dense values, not {tensor.layout}; edit another value"
            raise ServiceError(ErrorReason.EDIT_DTYPE_REJECTED, problem)
