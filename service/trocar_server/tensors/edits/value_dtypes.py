"""Dtype ranges: operands are cast to the value's dtype, and lose at most digits."""

from collections.abc import Sequence

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.edits.value_signature import ValueSignature
from trocar_server.tensors.reductions import OperandSpec, dtype_name

_BOOLEAN, _INTEGER, _FLOAT, _COMPLEX = range(4)


def kind(dtype: torch.dtype) -> int:
    """Return 0 for bool, 1 for integers, 2 for floats, 3 for complex: each can represent those before it."""
    if dtype.is_complex:
        return _COMPLEX
    if dtype.is_floating_point:
        return _FLOAT
    return _BOOLEAN if dtype == torch.bool else _INTEGER


def need_kind(signature: ValueSignature, dtype: torch.dtype) -> None:
    """Reject tensors that would lose more than digits: a float does not become an integer.

    Raises:
        ServiceError: `EDIT_DTYPE_REJECTED`.
    """
    if kind(dtype) > kind(signature.dtype):
        raise signature.rejection(f"its tensor is {dtype_name(dtype)}; give {dtype_name(signature.dtype)}")


def need_lossless(signature: ValueSignature, dtype: torch.dtype) -> None:
    """Reject values of a pass that would lose more than digits; integers must be exact.

    Raises:
        ServiceError: `EDIT_DTYPE_REJECTED`.
    """
    is_wider_integer = (
        kind(signature.dtype) <= _INTEGER and torch.promote_types(dtype, signature.dtype) != signature.dtype
    )
    if kind(dtype) > kind(signature.dtype) or is_wider_integer:
        raise signature.rejection(f"the other value is {dtype_name(dtype)}; give one of the same dtype")


def need_number(signature: ValueSignature, number: float) -> None:
    """Reject a number out of the dtype's range.

    Raises:
        ServiceError: `EDIT_DTYPE_REJECTED`.
    """
    low, high = limits_of(signature.dtype)
    name = dtype_name(signature.dtype)
    if not low <= number <= high:
        raise signature.rejection(f"{number} is not within {low} to {high}, the numbers of {name}")
    if kind(signature.dtype) <= _INTEGER and number != int(number):
        raise signature.rejection(f"{number} is not a {name}; give a whole number")


def need_operands(signature: ValueSignature, *operands: float | OperandSpec | None) -> None:
    """Reject numbers out of the dtype's range, and tensors that do not fit; None is left out.

    Raises:
        ServiceError: `EDIT_DTYPE_REJECTED` or `EDIT_SHAPE_MISMATCH`.
    """
    for operand in operands:
        if isinstance(operand, OperandSpec):
            need_kind(signature, operand.dtype)
            signature.need_broadcast(operand)
        elif operand is not None:
            need_number(signature, operand)


def as_number(number: float, dtype: torch.dtype) -> float:
    """Return a number as Python's type for a dtype, so that torch does not promote the other operand."""
    if kind(dtype) == _BOOLEAN:
        return bool(number)
    return int(number) if kind(dtype) == _INTEGER else float(number)


def check_finite(operands: Sequence[torch.Tensor]) -> None:
    """Reject tensors with NaN or infinities.

    Raises:
        ServiceError: `NON_FINITE_VALUE`.
    """
    for place, tensor in enumerate(operands):
        low, high = extremes(tensor)
        if not (-float("inf") < low <= high < float("inf")):
            problem = f"tensor {place} of the edits, of shape {tuple(tensor.shape)}, holds NaN or infinities"
            raise ServiceError(ErrorReason.NON_FINITE_VALUE, f"{problem}; give finite numbers")


def limits_of(dtype: torch.dtype) -> tuple[float, float]:
    """Return the smallest and the largest number of a dtype."""
    if dtype == torch.bool:
        return 0, 1
    limits = torch.finfo(dtype) if kind(dtype) >= _FLOAT else torch.iinfo(dtype)
    return limits.min, limits.max


def extremes(tensor: torch.Tensor) -> tuple[float, float]:
    """Return the smallest and the largest number; NaN if any is NaN; 0 and 0 for an empty tensor."""
    if not tensor.numel():
        return 0, 0
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    low, high = torch.aminmax(real)
    return low.item(), high.item()
