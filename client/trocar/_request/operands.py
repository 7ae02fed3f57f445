"""Operands of edits and objectives: numbers and arrays, checked before sending: no NaN, no infinity."""

import math
from collections.abc import Collection
from numbers import Real
from operator import index as as_integer
from typing import Any, TypeAlias

import numpy as np

from trocar._base.tensors import (
    DTYPE_NAMES,
    Array,
    WireTensor,
    float_array,
    is_array,
    to_wire,
    wire_numpy_dtype,
)
from trocar._request.inputs import ArrayLike
from trocar_api.v1 import edit_pb2 as pb
from trocar_api.v1 import tensor_pb2
from trocar_api.value_words import not_one_of

Numbers: TypeAlias = list[Any] | tuple[Any, ...]
"""Numbers in lists, nested to any depth, each of the same length as its neighbours."""
OperandLike: TypeAlias = float | ArrayLike | Numbers
"""A number for all elements, or an array that is broadcast."""

_MAX_INT32, _MAX_INT64 = 2**31 - 1, 2**63 - 1
_BFLOAT16_EXPONENT = 0x7F80  # all ones: NaN or infinite, as in a float32


def number(label: str, value: object) -> float:
    """Return a finite number.

    Args:
        label: Its name in errors, for example "clamp: low".
        value: Of any library.

    Raises:
        TypeError: It is not a number.
        ValueError: It is NaN, infinite or too large.
    """
    if not is_number(value):
        raise TypeError(f"{label} is a number, not {type(value).__name__}")
    try:
        result = float(value)  # type: ignore[arg-type]  # `is_number` says that it can be
    except OverflowError:
        result = math.inf
    if not math.isfinite(result):
        raise ValueError(f"{label} is {result}; only finite numbers can be sent")
    return result


def integer(label: str, value: Any, low: int = -_MAX_INT64 - 1, high: int = _MAX_INT64) -> int:
    """Return a whole number in a range; 64 bits with a sign by default.

    Raises:
        TypeError: It is not a whole number.
        ValueError: It is out of range.
    """
    try:
        result = as_integer(value)
    except TypeError:
        raise TypeError(f"{label} is a whole number, not {value!r}") from None
    if not low <= result <= high:
        raise ValueError(f"{label} is {result}; it must be {low:,} to {high:,}")
    return result


def dimension(label: str, value: Any) -> int:
    """Return the number of a dimension, which may count from the end."""
    return integer(label, value, -_MAX_INT32 - 1, _MAX_INT32)


def count(label: str, value: Any) -> int:
    """Return a number of things, at least 1."""
    return integer(label, value, 1, _MAX_INT32)


def flag(label: str, value: object) -> bool:
    """Return a bool.

    Raises:
        TypeError: It is something else, such as the text "false".
    """
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{label} is True or False, not {value!r}")
    return bool(value)


def one_of(label: str, value: object, names: Collection[str]) -> str:
    """Return a known name.

    Raises:
        ValueError: There is no such name.
    """
    if not isinstance(value, str) or value not in names:
        raise ValueError(f"{label} {not_one_of(value, names)}")
    return value


def text(label: str, value: object) -> str:
    """Return a text that is not empty.

    Raises:
        TypeError: It is no text.
        ValueError: It is empty.
    """
    if not isinstance(value, str):
        raise TypeError(f"{label} must be a string, not {type(value).__name__}")
    if not value.strip():
        raise ValueError(f"{label} is empty")
    return value


def operand(label: str, value: object) -> tuple[pb.Operand, tuple[WireTensor, ...]]:
    """Return a number or an array as a message, with the array where it is one.

    Raises:
        TypeError: It is neither.
        ValueError: Something in it is NaN or infinite, or it is empty.
    """
    if is_number(value):
        return pb.Operand(constant=number(label, value)), ()
    sent = tensor(label, value)
    return pb.Operand(tensor=spec(sent)), (sent,)


def tensor(label: str, value: object, ranks: Collection[int] = range(9)) -> WireTensor:
    """Return an array, or numbers in lists, as it is sent: a copy, unaffected by later changes.

    Args:
        label: Its name in errors.
        value: The array.
        ranks: How many dimensions it may have.

    Raises:
        TypeError: It is not an array of numbers.
        ValueError: Something in it is NaN or infinite, it is empty, or of another rank.
    """
    sent = to_wire(_array(label, value))
    if len(sent.shape) not in ranks:
        wanted = " or ".join(map(str, ranks))
        raise ValueError(f"{label} has the shape {sent.shape}; it has {wanted} dimensions")
    if 0 in sent.shape:
        raise ValueError(f"{label} has the shape {sent.shape}, so it is empty")
    copy = sent._replace(payload=memoryview(bytes(sent.payload)))
    if not _is_finite(copy):
        raise ValueError(f"{label} has NaN or infinite elements; only finite numbers can be sent")
    return copy


def class_factors(weights: object) -> list[float]:
    """Return the factors of a loss for each class; empty if none are given.

    Raises:
        TypeError: They are not one number for each class.
        ValueError: One is NaN, infinite or negative, or they are all 0.
    """
    if weights is None:
        return []
    array = float_array(_array("class_weights", weights))
    if array.ndim != 1 or not array.size or array.dtype.kind not in "biuf":
        raise TypeError(f"class_weights is a list with one number for each class, not {weights!r}")
    factors = [number("class_weights", factor) for factor in array.tolist()]
    if min(factors) < 0 or not any(factors):
        raise ValueError("class_weights are at least 0, and not all 0")
    return factors


def mask_tensor(value: object) -> WireTensor:
    """Return the mask of an edit, as it is sent.

    Raises:
        TypeError: It is not bool.
        ValueError: It is empty.
    """
    sent = tensor("mask", value)
    if sent.dtype != tensor_pb2.DTYPE_BOOL:
        raise TypeError(
            f"a mask must be bool, not {DTYPE_NAMES[sent.dtype]}; give positions with channels=, samples= "
            "or index="
        )
    return sent


def spec(sent: WireTensor) -> tensor_pb2.TensorSpec:
    """Return dtype and shape of an array as a message."""
    return tensor_pb2.TensorSpec(dtype=sent.dtype, shape=sent.shape)


def is_number(value: object) -> bool:
    """Whether a value is one number, of Python or NumPy."""
    return isinstance(value, (Real, np.bool_))


def _array(label: str, value: object) -> object:
    """Return what `to_wire` takes; lists become arrays."""
    if isinstance(value, (list, tuple)):
        try:
            value = np.asarray(value)
        except ValueError as error:
            raise ValueError(f"{label}: lists of different lengths cannot be an array") from error
    if not is_array(value) and not is_number(value):
        given = repr(value) if isinstance(value, str) else type(value).__name__
        raise TypeError(f"{label} is a number or an array, not {given}")
    array: object = np.asarray(value) if is_number(value) else value
    if isinstance(array, np.ndarray) and array.dtype.kind not in "biufcV":
        raise TypeError(f"{label} has elements that are not numbers")
    return array


def _is_finite(sent: WireTensor) -> bool:
    name = DTYPE_NAMES[sent.dtype]
    array: Array = np.frombuffer(sent.payload, wire_numpy_dtype(name))
    if name == "bfloat16":
        return bool(((array & _BFLOAT16_EXPONENT) != _BFLOAT16_EXPONENT).all())
    return bool(np.isfinite(array).all())
