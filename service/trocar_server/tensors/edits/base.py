"""Operation: the base class of edit operations, with the checks and the arithmetic that each declares."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar, Self

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.edits.part import Part
from trocar_server.tensors.edits.value_signature import ValueSignature
from trocar_server.tensors.reductions import OperandSpec

OPERATIONS: dict[str, type["Operation"]] = {}
"""Every operation by its name on the wire; a subclass of `Operation` with a name adds itself."""


@dataclass(frozen=True)
class Operation(ABC):
    """An operation on a value: plain data, hashable, free of tensors.

    A subclass declares its options as fields, with the names of its message in `edit.proto`, and

    - `__post_init__`: what is wrong with the options, beside any value;
    - `check`: what is wrong with them for a part of this shape and dtype;
    - `apply`: the arithmetic.

    Errors name an operation by its `str`.

    Attributes:
        name: As on the wire and in clients.
        takes_integers: Whether it is defined for integers, too.
        takes_booleans: Whether it is defined for booleans, too.
        takes_complex: Whether it is defined for complex numbers, which have no order.
        takes_other: Whether it needs another value of the pass, `Part.other`.
        is_on_values: Whether it computes a value; otherwise it acts on the call and `apply` is not for it.
        wide_copies: The most temporaries of `apply`, as tensors of the part's size in float64, besides its
            result.
        operand_copies: Copies of its tensors in float64 that `apply` makes, at most.
        is_range_free: Whether its tensors are used in float64 only, so that their numbers may be outside of
            the range of the value's dtype.
    """

    name: ClassVar[str] = ""
    takes_integers: ClassVar[bool] = False
    takes_booleans: ClassVar[bool] = False
    takes_complex: ClassVar[bool] = True
    takes_other: ClassVar[bool] = False
    is_on_values: ClassVar[bool] = True
    wide_copies: ClassVar[int] = 0
    operand_copies: ClassVar[int] = 2
    is_range_free: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if cls.name:
            OPERATIONS[cls.name] = cls

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ServiceError(
                    ErrorReason.NON_FINITE_VALUE,
                    f"{self.name}: {field.name} is {value}; edits take finite numbers only",
                )

    def __str__(self) -> str:
        return self.name

    def operands(self) -> Iterator[OperandSpec]:
        """Yield the tensors of the request, in the order of their payloads."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, OperandSpec):
                yield value

    def check(self, part: ValueSignature) -> None:  # noqa: B027 # most operations fit every part
        """Check that it fits a part of this signature.

        Raises:
            ServiceError: `EDIT_SHAPE_MISMATCH` or `EDIT_DTYPE_REJECTED`.
        """

    def check_other(  # noqa: B027 # only for operations with `takes_other`
        self, value: ValueSignature, shape: tuple[int, ...] | None, dtype: torch.dtype | None
    ) -> None:
        """Check that it fits the other value; None where its shape or dtype is not known.

        Raises:
            ServiceError: `EDIT_SHAPE_MISMATCH` or `EDIT_DTYPE_REJECTED`.
        """

    def mixed_dims(self, part: ValueSignature) -> tuple[int, ...]:
        """Return the dimensions along which the result at one place depends on other places."""
        return ()

    def at(self, position: int) -> Self:
        """Return the operation for a part whose first token has a position of its text, from 0."""
        return self

    @abstractmethod
    def apply(self, part: Part) -> torch.Tensor:
        """Return the new part; `part.value` is not written to and not returned."""


def require(is_right: bool, problem: str) -> None:
    """Reject an invalid declaration, independent of any value.

    Raises:
        ServiceError: `INVALID_ARGUMENT`.
    """
    if not is_right:
        raise ServiceError(ErrorReason.INVALID_ARGUMENT, problem)


def require_seed(operation: Operation, seed: int) -> None:
    """Reject a seed that torch does not accept.

    Raises:
        ServiceError: `INVALID_ARGUMENT`.
    """
    is_right = -(2**63) <= seed < 2**63
    require(is_right, f"{operation}: seed {seed}; it must fit 64 bits with a sign")
