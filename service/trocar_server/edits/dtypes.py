"""Which numbers a dtype holds: constants get the value's dtype, and lose no more than digits."""

from collections.abc import Sequence

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.edits.edit import Edit
from trocar_server.edits.form import Form
from trocar_server.edits.operation import Project
from trocar_server.errors import ServiceError
from trocar_server.reductions import dtype_name

_BOOLEAN, _INTEGER, _FLOAT, _COMPLEX = range(4)


def kind(dtype: torch.dtype) -> int:
    """Return 0 for bool, 1 for integers, 2 for floats, 3 for complex: each holds those before it."""
    if dtype.is_complex:
        return _COMPLEX
    if dtype.is_floating_point:
        return _FLOAT
    return _BOOLEAN if dtype == torch.bool else _INTEGER


def need_kind(form: Form, dtype: torch.dtype) -> None:
    """Refuse tensors that would lose more than digits: a float does not become an integer.

    Raises:
        ServiceError: `EDIT_DTYPE_REJECTED`.
    """
    if kind(dtype) > kind(form.dtype):
        raise form.rejection(f"its tensor is {dtype_name(dtype)}; give {dtype_name(form.dtype)}")


def need_lossless(form: Form, dtype: torch.dtype) -> None:
    """Refuse values of a pass that would lose more than digits: integers keep all.

    Raises:
        ServiceError: `EDIT_DTYPE_REJECTED`.
    """
    is_wider_integer = kind(form.dtype) <= _INTEGER and torch.promote_types(dtype, form.dtype) != form.dtype
    if kind(dtype) > kind(form.dtype) or is_wider_integer:
        raise form.rejection(f"the other value is {dtype_name(dtype)}; take one of the same dtype")


def need_number(form: Form, number: float) -> None:
    """Refuse a number that the dtype cannot hold.

    Raises:
        ServiceError: `EDIT_DTYPE_REJECTED`.
    """
    low, high = _limits(form.dtype)
    name = dtype_name(form.dtype)
    if not low <= number <= high:
        raise form.rejection(f"{number} is not within {low} to {high}, the numbers of {name}")
    if kind(form.dtype) <= _INTEGER and number != int(number):
        raise form.rejection(f"{number} is no {name}; give a whole number")


def as_number(number: float, dtype: torch.dtype) -> float:
    """Return a number as Python's type for a dtype, so that torch does not promote what it meets."""
    if kind(dtype) == _BOOLEAN:
        return bool(number)
    return int(number) if kind(dtype) == _INTEGER else float(number)


def check_finite(constants: Sequence[torch.Tensor]) -> None:
    """Refuse tensors that hold NaN or infinities.

    Raises:
        ServiceError: `NON_FINITE_VALUE`.
    """
    for place, constant in enumerate(constants):
        low, high = _extremes(constant)
        if not (-float("inf") < low <= high < float("inf")):
            problem = (
                f"tensor {place} of the edits, of shape {tuple(constant.shape)}, holds NaN or infinities"
            )
            raise ServiceError(ErrorReason.NON_FINITE_VALUE, f"{problem}; give finite numbers")


def check_constants(edit: Edit, constants: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
    """Refuse tensors of one edit that hold numbers that a value's dtype cannot.

    `edit_value` does not look at them: that would wait for the device.

    Args:
        edit: The edit that `check_edit` has passed.
        constants: Its tensors, finite, in the order of `edit.constants`.
        dtype: Of the value that it is for.

    Raises:
        ServiceError: `EDIT_DTYPE_REJECTED`.
    """
    if isinstance(edit.operation, Project):  # computed in float64
        return
    low, high = _limits(dtype)
    for constant in constants[edit.region.mask is not None :]:
        least, most = _extremes(constant)
        if least < low or most > high:
            problem = f"numbers from {least} to {most} are not within {low} to {high}, those of its dtype"
            raise ServiceError(
                ErrorReason.EDIT_DTYPE_REJECTED,
                f"{edit.operation} does not fit a {dtype_name(dtype)} value: {problem}; give others",
            )


def _limits(dtype: torch.dtype) -> tuple[float, float]:
    if dtype == torch.bool:
        return 0, 1
    limits = torch.finfo(dtype) if kind(dtype) >= _FLOAT else torch.iinfo(dtype)
    return limits.min, limits.max


def _extremes(constant: torch.Tensor) -> tuple[float, float]:
    """Return the smallest and the largest number, NaN where there is one; 0 and 0 of an empty tensor."""
    if not constant.numel():
        return 0, 0
    real = torch.view_as_real(constant.resolve_conj()) if constant.is_complex() else constant
    low, high = torch.aminmax(real)
    return low.item(), high.item()
