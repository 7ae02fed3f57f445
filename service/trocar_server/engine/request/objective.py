"""Objectives of gradients, as plain data: one number made from values of a pass."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum, unique
from typing import TypeAlias

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery import Selector
from trocar_server.tensors.reductions import OperandSpec, Reduction


@unique
class ScoreKind(StrEnum):
    """How a class is scored."""

    LOGIT = "logit"
    PROBABILITY = "probability"
    LOG_PROBABILITY = "log_probability"


@unique
class ElementFunction(StrEnum):
    """Element-wise function."""

    IDENTITY = "identity"
    SQUARE = "square"
    ABS = "abs"
    LOG = "log"
    EXP = "exp"


@unique
class Aggregate(StrEnum):
    """Aggregation of elements to one number."""

    SUM = "sum"
    MEAN = "mean"
    NORM = "norm"


@unique
class LossKind(StrEnum):
    """A loss of torch, with its defaults."""

    CROSS_ENTROPY = "cross_entropy"
    NLL = "nll"
    BCE_WITH_LOGITS = "bce_with_logits"
    MSE = "mse"
    L1 = "l1"
    SMOOTH_L1 = "smooth_l1"
    KL_DIV = "kl_div"


@dataclass(frozen=True)
class ClassScore:
    """The sum over the samples of the score of a class: one class for all, or one for each sample."""

    selector: Selector
    classes: tuple[int, ...]
    kind: ScoreKind = ScoreKind.LOGIT


@dataclass(frozen=True)
class ValueScore:
    """aggregate(function(reductions(value)))."""

    selector: Selector
    reductions: tuple[Reduction, ...] = ()
    channel_dim: int | None = None
    function: ElementFunction = ElementFunction.IDENTITY
    aggregate: Aggregate = Aggregate.SUM


@dataclass(frozen=True)
class Loss:
    """A loss over the batch."""

    kind: LossKind
    selector: Selector
    labels: OperandSpec
    is_sum: bool = False


@dataclass(frozen=True)
class GradientPenalty:
    """The mean over the samples of (|gradient of `of` with respect to the selector| - center)^2."""

    of: "Objective"
    selector: Selector
    center: float = 0.0


Score: TypeAlias = ClassScore | ValueScore | Loss | GradientPenalty


@dataclass(frozen=True)
class Term:
    """A weighted score."""

    weight: float
    score: Score

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ServiceError(
                ErrorReason.NON_FINITE_VALUE, f"objective: a weight is {self.weight}; it must be finite"
            )


@dataclass(frozen=True)
class Objective:
    """A weighted sum of scores."""

    terms: tuple[Term, ...]

    @property
    def operands(self) -> Iterator[OperandSpec]:
        """The tensors sent with it: the labels of its losses, in order."""
        for term in self.terms:
            if isinstance(term.score, Loss):
                yield term.score.labels
            if isinstance(term.score, GradientPenalty):
                yield from term.score.of.operands

    @property
    def penalties(self) -> Iterator[GradientPenalty]:
        """Its penalties of gradients, in order."""
        return (term.score for term in self.terms if isinstance(term.score, GradientPenalty))

    @property
    def selectors(self) -> Iterator[Selector]:
        """The values that it is computed from, in order."""
        for term in self.terms:
            if isinstance(term.score, GradientPenalty):
                yield from term.score.of.selectors
            else:
                yield term.score.selector

    @property
    def has_reductions(self) -> bool:
        """Whether a value is reduced first, which may depend on padding."""
        scores = [term.score for term in self.terms]
        return any(isinstance(score, ValueScore) and bool(score.reductions) for score in scores) or any(
            penalty.of.has_reductions for penalty in self.penalties
        )

    @property
    def needs_second_derivative(self) -> bool:
        """Whether it contains a gradient."""
        return any(isinstance(term.score, GradientPenalty) for term in self.terms)
