"""What all operations have in common."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar, TypeAlias

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.reductions import ConstantSpec

Operand: TypeAlias = float | ConstantSpec
"""A number for all elements, or a tensor that comes along and is broadcast to the part."""


@dataclass(frozen=True)
class Operation:
    """What is done to a value.

    Attributes:
        name: As on the wire and in clients.
        takes_integers: Whether it makes sense for integers, too.
        takes_booleans: Whether it makes sense for booleans, too.
        takes_complex: Whether it makes sense for complex numbers, which have no order.
    """

    name: ClassVar[str] = ""
    takes_integers: ClassVar[bool] = False
    takes_booleans: ClassVar[bool] = False
    takes_complex: ClassVar[bool] = True

    def __str__(self) -> str:
        return self.name

    def constants(self) -> Iterator[ConstantSpec]:
        """Yield the tensors that come along, in the order of their payloads."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, ConstantSpec):
                yield value

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise ServiceError(
                    ErrorReason.NON_FINITE_VALUE,
                    f"{self.name}: {field.name} is {value}; edits take finite numbers only",
                )


def require(is_right: bool, problem: str) -> None:
    """Refuse what is wrong in itself, beside any value.

    Raises:
        ServiceError: `INVALID_ARGUMENT`.
    """
    if not is_right:
        raise ServiceError(ErrorReason.INVALID_ARGUMENT, problem)


def require_seed(operation: Operation, seed: int) -> None:
    """Refuse what torch takes for no seed.

    Raises:
        ServiceError: `INVALID_ARGUMENT`.
    """
    is_right = -(2**63) <= seed < 2**63
    require(is_right, f"{operation}: seed {seed}; it must fit 64 bits with a sign")
