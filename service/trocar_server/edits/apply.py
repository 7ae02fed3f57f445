"""An edit, applied to a value."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.edits import chance, channels, elementwise, norms, rounding, samples
from trocar_server.edits.base import Operation
from trocar_server.edits.checking import resolve
from trocar_server.edits.edit import Edit
from trocar_server.edits.operation import (
    Add,
    AddInput,
    Affine,
    Cast,
    Clamp,
    Dropout,
    MeanAblate,
    NanToNum,
    Noise,
    Normalise,
    Project,
    ProjectOnto,
    Resample,
    Scale,
    Set,
    Skip,
    Steer,
    Swap,
    TopK,
    Zero,
)
from trocar_server.edits.part import Part
from trocar_server.edits.region import Selection
from trocar_server.errors import ServiceError

_Work: TypeAlias = Callable[[Part, Any], torch.Tensor]

_WORK: dict[type[Operation], _Work] = {
    Set: elementwise.replace,
    Zero: elementwise.zero,
    Add: elementwise.add,
    Scale: elementwise.scale,
    Affine: elementwise.affine,
    Clamp: elementwise.clamp,
    NanToNum: elementwise.nan_to_num,
    Swap: elementwise.swap,
    AddInput: elementwise.add_input,
    MeanAblate: samples.mean_ablate,
    Resample: samples.resample,
    Steer: channels.steer,
    Project: channels.project,
    ProjectOnto: channels.project,
    TopK: channels.top_k,
    Normalise: norms.normalise,
    Noise: chance.noise,
    Dropout: chance.dropout,
    Cast: rounding.cast,
}


def edit_value(
    edit: Edit,
    value: torch.Tensor,
    constants: Sequence[torch.Tensor] = (),
    other: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return what an edit makes of a value: a new tensor of its shape, dtype and memory layout.

        edit_value(Edit(Scale(0.0), Region(takes=(Take(Axis.CHANNELS, (1, 2)),))), feature_map)

    Nothing that is given is written, and the result shares no memory with it: a module that works in place
    may write into the result. Differentiable with respect to the value and the other one. On the meta
    device nothing is computed.

    Args:
        edit: What to do, and to which part. `skip` is no operation on a value.
        value: A dense tensor on any device.
        constants: The tensors of `edit.constants`, in order, on any device; see `check_constants`.
        other: For a swap the value from elsewhere, of the whole value's shape or with a batch of 1; for
            `add_input` the module's input; other operations do not look at it.

    Raises:
        ServiceError: `EDIT_SHAPE_MISMATCH` or `EDIT_DTYPE_REJECTED`, as `check_edit`.
        ValueError: `constants` are not those of the edit, there is no other value, or it is a skip.
    """
    other = other if isinstance(edit.operation, Swap | AddInput) else None
    _check_arguments(edit, value, constants, other)
    other_form = (None, None) if other is None else (tuple(other.shape), other.dtype)
    selection = resolve(edit, tuple(value.shape), value.dtype, *other_form)
    if value.is_meta or 0 in selection.form.shape:
        return value.clone()
    if edit.region.mask is not None:
        edited = _work(edit.operation, selection, value, constants[1:], other)
        return _laid_out_as(value, torch.where(constants[0].to(value.device), edited, value))
    edited = _work(edit.operation, selection, value, constants, other)
    if edit.region.is_whole:
        return _laid_out_as(value, edited)
    result = value.clone()
    selection.write(result, edited)
    return result


def _work(
    operation: Operation,
    selection: Selection,
    value: torch.Tensor,
    constants: Sequence[torch.Tensor],
    other: torch.Tensor | None,
) -> torch.Tensor:
    """Return what the operation makes of the part."""
    own = None if other is None else selection.read(other.expand(value.shape))  # of a batch of 1
    part = Part(selection.read(value), selection.form, tuple(constants), own)
    return _WORK[type(operation)](part, operation)


def _laid_out_as(value: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """Return what was found in the memory layout of `torch.empty_like(value)`; copied if it must be."""
    if found.stride() == value.stride():
        return found
    wanted = torch.empty_like(value)
    pairs = zip(found.stride(), wanted.stride(), value.shape, strict=True)
    is_same = all(own == like for own, like, size in pairs if size > 1)
    return found if is_same else wanted.copy_(found)


def _check_arguments(
    edit: Edit, value: torch.Tensor, constants: Sequence[torch.Tensor], other: torch.Tensor | None
) -> None:
    wanted = [(spec.dtype, spec.shape) for spec in edit.constants]
    given = [(tensor.dtype, tuple(tensor.shape)) for tensor in constants]
    if wanted != given:
        raise ValueError(f"constants are {given}, but {edit.operation} needs {wanted}")
    if isinstance(edit.operation, Skip):
        raise ValueError("skip is no operation on a value; do not run the module")
    if other is None and isinstance(edit.operation, Swap | AddInput):
        raise ValueError(f"{edit.operation} needs another value")
    for tensor in (value,) if other is None else (value, other):
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            problem = f"{edit.operation} takes dense values, this one is {tensor.layout}; edit another value"
            raise ServiceError(ErrorReason.EDIT_DTYPE_REJECTED, problem)
