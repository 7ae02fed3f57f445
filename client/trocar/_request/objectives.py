"""Objectives of gradients: a weighted sum of scores, written with `+`, `-`, `*` and `/`."""

import math
from dataclasses import dataclass
from typing import Any

from trocar._base.tensors import WireTensor
from trocar._request.operands import is_number, number
from trocar_api.v1 import objective_pb2 as pb

MAX_TERMS = 64


@dataclass(frozen=True)
class Term:
    """One score and its weight."""

    score: pb.ObjectiveTerm
    """The score as a message, without the weight."""
    text: str
    """As it was written."""
    weight: float = 1.0
    """Finite."""
    tensors: tuple[WireTensor, ...] = ()
    """Arrays that go with it, in order: the labels of losses."""

    def scaled(self, factor: float) -> "Term":
        """Return it with its weight multiplied."""
        weight = self.weight * factor
        if not math.isfinite(weight):
            raise ValueError(f"the weight of {self.text} is {weight}; only finite numbers can be sent")
        return Term(self.score, self.text, weight, self.tensors)

    def to_wire(self) -> pb.ObjectiveTerm:
        """Return the term as a message."""
        message = pb.ObjectiveTerm(weight=None if self.weight == 1.0 else self.weight)
        message.MergeFrom(self.score)
        return message


@dataclass(frozen=True)
class Objective:
    """The scalar whose gradients are computed, made from values of a pass.

        of = trocar.logit(207)
        of = trocar.logit(207) - 0.5 * trocar.logit(208)
        of = 1 - trocar.value("/out", reduce="mean")

    Objectives can be added, subtracted, negated, and multiplied and divided by numbers. An added number has
    no gradient; it only changes `FeatureMaps.objective`.
    """

    terms: tuple[Term, ...]
    """1 to 64."""
    offset: float = 0.0
    """What is added on this side to the value that the server returns."""

    # NumPy's numbers would otherwise take an objective for an array.
    __array_ufunc__ = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.terms) <= MAX_TERMS:
            raise ValueError(f"an objective has 1 to {MAX_TERMS} terms, not {len(self.terms)}")

    def __hash__(self) -> int:
        return hash(self.to_wire().SerializeToString(deterministic=True))  # messages have no hash

    def __repr__(self) -> str:
        words = [_signed(term.weight, term.text) for term in self.terms]
        if self.offset:
            words.append(("-" if self.offset < 0 else "+", repr(abs(self.offset))))
        first = f"-{words[0][1]}" if words[0][0] == "-" else words[0][1]
        return " ".join([first, *(f"{sign} {text}" for sign, text in words[1:])])

    def __add__(self, other: object) -> "Objective":
        if isinstance(other, Objective):
            return Objective((*self.terms, *other.terms), _sum(self.offset, other.offset))
        if is_number(other):
            return Objective(self.terms, _sum(self.offset, number("what is added to an objective", other)))
        return NotImplemented

    __radd__ = __add__

    def __sub__(self, other: Any) -> "Objective":
        return self.__add__(-other) if isinstance(other, Objective) or is_number(other) else NotImplemented

    def __rsub__(self, other: object) -> "Objective":
        return -self + other

    def __mul__(self, factor: object) -> "Objective":
        if isinstance(factor, Objective):
            raise TypeError(
                "objectives can be added, not multiplied; a square is value(..., function='square')"
            )
        if not is_number(factor):
            return NotImplemented
        weight = number("the weight of an objective", factor)
        return Objective(tuple(term.scaled(weight) for term in self.terms), self.offset * weight)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> "Objective":
        if not is_number(divisor):
            return NotImplemented
        return self * (1.0 / number("the divisor of an objective", divisor))

    def __neg__(self) -> "Objective":
        return self * -1.0

    def __pos__(self) -> "Objective":
        return self

    def to_wire(self) -> pb.Objective:
        """Return the objective as a message."""
        return pb.Objective(terms=[term.to_wire() for term in self.terms])

    def payloads(self) -> list[memoryview]:
        """Return the bytes of the labels of its losses, in order."""
        return [tensor.payload for term in self.terms for tensor in term.tensors]


def objective_of(score: pb.ObjectiveTerm, text: str, tensors: tuple[WireTensor, ...] = ()) -> Objective:
    """Return the objective of one score."""
    return Objective((Term(score, text, tensors=tensors),))


def as_objective(value: object) -> Objective:
    """Return an objective as it is.

    Raises:
        TypeError: It is none.
    """
    if isinstance(value, Objective):
        return value
    raise TypeError(
        f"of={value!r} is not an objective; create one with trocar.logit, trocar.value, trocar.loss or "
        "another of these functions"
    )


def _signed(weight: float, text: str) -> tuple[str, str]:
    sign = "-" if weight < 0 else "+"
    return sign, text if abs(weight) == 1 else f"{abs(weight)!r} * {text}"


def _sum(one: float, other: float) -> float:
    return number("the sum of what is added to an objective", one + other)
