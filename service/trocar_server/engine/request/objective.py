"""Objectives of gradients, as plain data: one number made from values of a pass."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum, unique
from typing import TypeAlias

from trocar_api.class_names import class_number
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery import Selector
from trocar_server.tensors.reductions import OperandSpec, Positions, Reduction, TokenRows


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
    """A loss of torch."""

    CROSS_ENTROPY = "cross_entropy"
    NLL = "nll"
    BCE_WITH_LOGITS = "bce_with_logits"
    MSE = "mse"
    L1 = "l1"
    SMOOTH_L1 = "smooth_l1"
    KL_DIV = "kl_div"


@dataclass(frozen=True)
class ClassScore:
    """The sum over the samples of the score of a class: one class for all, or one for each sample.

    With positions of texts, the sum over these: one class for all, or one for each.
    """

    selector: Selector
    classes: tuple[int, ...]
    kind: ScoreKind = ScoreKind.LOGIT
    positions: Positions | TokenRows | None = None
    names: tuple[str, ...] = ()
    """Names in place of the classes, until the model is known; see `Objective.numbered`."""


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
    class_weights: tuple[float, ...] = ()
    """A factor for each class; 1 when empty."""


@dataclass(frozen=True)
class GradientPenalty:
    """The mean over the samples of (|gradient of `of` with respect to the selector| - center)^2."""

    of: "Objective"
    selector: Selector
    center: float = 0.0


Leaf: TypeAlias = ClassScore | ValueScore | Loss
Score: TypeAlias = Leaf | GradientPenalty


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
    def leaves(self) -> Iterator[Leaf]:
        """The scores that are computed from values, in order; of penalties those that they contain."""
        for term in self.terms:
            if isinstance(term.score, GradientPenalty):
                yield from term.score.of.leaves
            else:
                yield term.score

    def mapped(self, change: Callable[[Leaf], Leaf]) -> "Objective":
        """Return the same objective with each of its leaves changed."""

        def changed(score: Score) -> Score:
            if isinstance(score, GradientPenalty):
                return replace(score, of=score.of.mapped(change))
            return change(score)

        return Objective(tuple(replace(term, score=changed(term.score)) for term in self.terms))

    @property
    def operands(self) -> Iterator[OperandSpec]:
        """The tensors sent with it: the labels of its losses, in order."""
        return (leaf.labels for leaf in self.leaves if isinstance(leaf, Loss))

    @property
    def reductions(self) -> Iterator[Reduction]:
        """What its scores select and reduce, in order."""
        for leaf in self.leaves:
            if isinstance(leaf, ValueScore):
                yield from leaf.reductions
            elif isinstance(leaf, ClassScore) and leaf.positions is not None:
                yield leaf.positions

    @property
    def has_names(self) -> bool:
        """Whether a class is given by its name."""
        return any(isinstance(leaf, ClassScore) and bool(leaf.names) for leaf in self.leaves)

    def numbered(self, model_id: str, categories: Sequence[str]) -> "Objective":
        """Return the same objective with the numbers of classes in place of their names.

        Raises:
            ServiceError: `OBJECTIVE_OUT_OF_RANGE`, the model has no class of a name, or several.
        """
        return self.mapped(lambda leaf: _numbered(leaf, model_id, categories))

    @property
    def penalties(self) -> Iterator[GradientPenalty]:
        """Its penalties of gradients, in order."""
        return (term.score for term in self.terms if isinstance(term.score, GradientPenalty))

    @property
    def selectors(self) -> Iterator[Selector]:
        """The values that it is computed from, in order."""
        return (leaf.selector for leaf in self.leaves)

    @property
    def has_reductions(self) -> bool:
        """Whether a value is reduced first, which may depend on padding."""
        return any(isinstance(leaf, ValueScore) and bool(leaf.reductions) for leaf in self.leaves)

    @property
    def needs_second_derivative(self) -> bool:
        """Whether it contains a gradient."""
        return next(self.penalties, None) is not None


def _numbered(leaf: Leaf, model_id: str, categories: Sequence[str]) -> Leaf:
    if not isinstance(leaf, ClassScore) or not leaf.names:
        return leaf
    try:
        classes = tuple(class_number(name, categories) for name in leaf.names)
    except ValueError as error:
        raise ServiceError(ErrorReason.OBJECTIVE_OUT_OF_RANGE, f"'{model_id}' has {error}") from None
    return replace(leaf, classes=classes, names=())
