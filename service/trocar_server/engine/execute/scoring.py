"""Scoring: an objective's number from the values of a pass. See `engine.request.objective` for the words.

Losses are torch's own (`torch.nn.functional`). Everything is computed in the values' dtype, half floats in
float32.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.engine.request.objective import (
    Aggregate,
    ClassScore,
    ElementFunction,
    GradientPenalty,
    Loss,
    LossKind,
    Objective,
    Score,
    ScoreKind,
    ValueScore,
)
from trocar_server.errors import ServiceError, first_line
from trocar_server.surgery import Target, ValueMissingError
from trocar_server.surgery.axes.layout import Layout, channel_dim_of, samples_dim_of
from trocar_server.tensors.losses import CLASS_WEIGHTS, LOSSES
from trocar_server.tensors.reductions import TokenRows, reduce_value
from trocar_server.tensors.reductions.padding import NO_PADDING, Own, Padding
from trocar_server.tensors.stats.statistic import default_channel_dim

GradientOf = Callable[[torch.Tensor, str], torch.Tensor]
"""Returns the differentiable gradient of a number with respect to the value of this name."""

Scored = tuple[torch.Tensor, Own | None, Layout | None]
"""A value, which positions are no padding, None without padding, and its layout, None if it is not known."""

IGNORED_LABEL = -100
"""The label that `cross_entropy` and `nll_loss` ignore."""


@dataclass(frozen=True)
class Scoring:
    """The objective of one pass.

    Attributes:
        objective: The objective.
        values: The values of `Objective.selectors`, in order.
        anchors: The names of the values of its penalties, in order.
        labels: The tensors of `Objective.operands`, in order.
    """

    objective: Objective
    values: tuple[Target, ...]
    anchors: tuple[str, ...]
    labels: tuple[torch.Tensor, ...]

    def number(
        self, found: Mapping[str, torch.Tensor], gradient: GradientOf, arguments: Mapping[str, object]
    ) -> torch.Tensor:
        """Return the number of the objective.

        Args:
            found: The values of the pass by name.
            gradient: Computes the gradients of penalties.
            arguments: Of the forward by name; masks among them tell what is padding.

        Raises:
            ValueMissingError: The pass did not compute one of the values.
            ServiceError: See `objective_value`.
        """
        missing = next((target.name for target in self.values if target.name not in found), None)
        if missing is not None:
            raise ValueMissingError(missing)
        chosen = [found[target.name] for target in self.values]
        padding = Padding.of(arguments) if self.objective.has_reductions else NO_PADDING
        layouts = [target.layout for target in self.values]
        owns = [padding.own(target.name, found[target.name], target.layout) for target in self.values]
        return objective_value(self.objective, chosen, self.labels, self.anchors, gradient, owns, layouts)


def objective_value(
    objective: Objective,
    values: Sequence[torch.Tensor],
    labels: Sequence[torch.Tensor],
    anchors: Sequence[str] = (),
    gradient: GradientOf | None = None,
    owns: Sequence[Own | None] | None = None,
    layouts: Sequence[Layout | None] | None = None,
) -> torch.Tensor:
    """Return the number of an objective.

    Args:
        objective: The objective.
        values: The values of `Objective.selectors`, in order.
        labels: The tensors of `Objective.operands`, in order.
        anchors: The names of the values of its penalties, in order.
        gradient: Computes the penalties' gradients.
        owns: For each value, which positions are no padding, None without padding; None if no value has any.
            See Note: [Padding].
        layouts: For each value, its layout, None where that is not known; None if no value has one.

    Raises:
        ServiceError: `OBJECTIVE_OUT_OF_RANGE` or `OBJECTIVE_REJECTED`.
    """
    nothing = [None] * len(values)
    scored = zip(values, owns or nothing, layouts or nothing, strict=True)
    return _sum(objective, scored, iter(labels), iter(anchors), gradient)


def _sum(
    objective: Objective,
    values: Iterator[Scored],
    labels: Iterator[torch.Tensor],
    anchors: Iterator[str],
    gradient: GradientOf | None,
) -> torch.Tensor:
    total: torch.Tensor | None = None
    for term in objective.terms:
        if isinstance(term.score, GradientPenalty):
            inner = _sum(term.score.of, values, labels, anchors, None)
            number = _penalty(term.score, inner, next(anchors), gradient)
        else:
            number = _score(term.score, next(values), labels)
        total = term.weight * number if total is None else total + term.weight * number
    assert total is not None  # an objective has a term
    return total


def _wide(value: torch.Tensor) -> torch.Tensor:
    if not value.is_floating_point():
        dtype = str(value.dtype).removeprefix("torch.")
        raise _rejected(f"it uses a value of dtype {dtype}, and only floats have gradients")
    return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def _score(score: Score, scored: Scored, labels: Iterator[torch.Tensor]) -> torch.Tensor:
    value = _wide(scored[0])
    if isinstance(score, ClassScore):
        return _class_score(score, value, scored[2])
    if isinstance(score, ValueScore):
        return _value_score(score, value, *scored[1:])
    assert isinstance(score, Loss)
    return _loss(score, value, next(labels))


def _class_score(score: ClassScore, value: torch.Tensor, layout: Layout | None) -> torch.Tensor:
    if value.dim() < 2:
        raise _rejected(
            "class scores need a dimension after that of the samples; the value has shape "
            f"{tuple(value.shape)}"
        )
    known = channel_dim_of(layout, None)
    dim = default_channel_dim(value.dim()) if known is None else known
    if dim == 0 or samples_dim_of(layout) != 0:
        raise _rejected("class scores need samples in the first dimension and classes in another one")
    batch, count = value.shape[0], value.shape[dim]
    if score.positions is not None:
        return _token_score(score, value.movedim(dim, -1))
    check_classes(score.classes, batch, count)
    if score.kind is ScoreKind.PROBABILITY:
        value = value.softmax(dim)
    elif score.kind is ScoreKind.LOG_PROBABILITY:
        value = value.log_softmax(dim)
    if len(set(score.classes)) == 1:
        return value.select(dim, score.classes[0]).sum()
    classes = torch.tensor(score.classes, device=value.device)
    rows = torch.arange(batch, device=value.device)
    return value.movedim(dim, 1)[rows, classes].sum()


def _token_score(score: ClassScore, value: torch.Tensor) -> torch.Tensor:
    """Return the sum of the scores at positions of texts, of (batch, tokens, classes)."""
    wanted = score.positions
    if not isinstance(wanted, TokenRows) or value.shape[:-1] != (len(wanted.rows), wanted.token_count):
        raise _rejected(
            f"positions of texts need scores (batch, tokens, classes) of their tokens; these have the shape "
            f"{tuple(value.shape)}"
        )
    places = [(sample, place) for sample, row in enumerate(wanted.rows) for place in row]
    if len(score.classes) not in (1, len(places)):
        raise _rejected(
            f"{len(score.classes)} classes for {len(places)} positions; give one for all, or one for each"
        )
    wrong = next((index for index in score.classes if index >= value.shape[-1]), None)
    if wrong is not None:
        raise _out_of_range(wrong, value.shape[-1])
    samples, rows = torch.tensor(places, dtype=torch.int64, device=value.device).T
    chosen = value[samples, rows]
    if score.kind is ScoreKind.PROBABILITY:
        chosen = chosen.softmax(-1)
    elif score.kind is ScoreKind.LOG_PROBABILITY:
        chosen = chosen.log_softmax(-1)
    classes = torch.tensor(score.classes, dtype=torch.int64, device=value.device).expand(len(places))
    return chosen.gather(1, classes[:, None]).sum()


def check_classes(classes: Sequence[int], batch: int, count: int) -> None:
    """Check classes against a number of samples and of classes.

    Raises:
        ServiceError: `OBJECTIVE_OUT_OF_RANGE`, or `OBJECTIVE_REJECTED` for a wrong number of them.
    """
    if len(classes) not in (1, batch):
        raise _rejected(f"{len(classes)} classes for {batch} samples; give one for all, or one for each")
    wrong = next((index for index in classes if not 0 <= index < count), None)
    if wrong is not None:
        raise _out_of_range(wrong, count)


def _value_score(
    score: ValueScore, value: torch.Tensor, own: Own | None, layout: Layout | None
) -> torch.Tensor:
    if score.reductions:
        channels = channel_dim_of(layout, score.channel_dim)
        samples = samples_dim_of(layout)
        reduced = reduce_value(value, score.reductions, channels, own=own, samples_dim=samples)
        # Padding that reductions leave in the value counts, as it does without them; filling is no element.
        is_filled = reduced.own is not None and reduced.is_filled
        value = reduced.own.elements(reduced.value) if reduced.own and is_filled else reduced.value
    functions: dict[ElementFunction, Callable[[torch.Tensor], torch.Tensor]] = {
        ElementFunction.IDENTITY: lambda x: x,
        ElementFunction.SQUARE: torch.square,
        ElementFunction.ABS: torch.abs,
        ElementFunction.LOG: torch.log,
        ElementFunction.EXP: torch.exp,
    }
    aggregates: dict[Aggregate, Callable[[torch.Tensor], torch.Tensor]] = {
        Aggregate.SUM: torch.sum,
        Aggregate.MEAN: torch.mean,
        Aggregate.NORM: torch.linalg.vector_norm,
    }
    return aggregates[score.aggregate](functions[score.function](value))


def _loss(score: Loss, value: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    labels = _fitting_labels(score, value, labels)
    mean = "batchmean" if score.kind is LossKind.KL_DIV else "mean"
    try:
        return LOSSES[score.kind].compute(
            value, labels, reduction="sum" if score.is_sum else mean, **_class_weights(score, value)
        )
    except (RuntimeError, ValueError, IndexError) as error:
        raise _rejected(
            f"{score.kind} of a value of shape {tuple(value.shape)} and labels of shape "
            f"{tuple(labels.shape)}: {first_line(error)}"
        ) from None


def _class_weights(score: Loss, value: torch.Tensor) -> dict[str, list[float]]:
    """Return the option of class weights, where the loss has some.

    Raises:
        ServiceError: `OBJECTIVE_REJECTED`, their number is not that of the classes, in dimension 1.
    """
    if not score.class_weights:
        return {}
    count = value.shape[min(1, value.dim() - 1)] if value.dim() else 1
    if len(score.class_weights) != count:
        raise _rejected(f"{score.kind}: {len(score.class_weights)} class weights for {count} classes")
    return {CLASS_WEIGHTS: list(score.class_weights)}


def _fitting_labels(score: Loss, value: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return labels in the dtype that the loss requires."""
    shape = tuple(value.shape)
    if LOSSES[score.kind].takes_indices and not labels.is_floating_point():
        expected = (*shape[:1], *shape[2:])
        if len(shape) < 2 or tuple(labels.shape) != expected:
            raise _rejected(f"{score.kind}: class labels of shape {tuple(labels.shape)}; expected {expected}")
        labels = labels.long()  # a narrow integer would wrap what it is compared with: -100 is 156 in uint8
        check_labels(labels, shape[1])
        return labels
    if score.kind is LossKind.NLL:
        raise _rejected("nll: labels are class indices, of an integer dtype")
    if tuple(labels.shape) != shape:
        raise _rejected(f"{score.kind}: labels of shape {tuple(labels.shape)}; the value has shape {shape}")
    return labels.to(value.dtype)


def check_labels(labels: torch.Tensor, count: int) -> None:
    """Check class labels, where they have data.

    Raises:
        ServiceError: `OBJECTIVE_OUT_OF_RANGE`.
    """
    if labels.is_meta:
        return
    wrong = labels[(labels != IGNORED_LABEL) & ((labels < 0) | (labels >= count))]
    if wrong.numel():
        raise _out_of_range(int(wrong.flatten()[0]), count)


def _penalty(
    score: GradientPenalty, inner: torch.Tensor, anchor: str, gradient: GradientOf | None
) -> torch.Tensor:
    if gradient is None:  # a check without a graph
        return inner.new_zeros(())
    result = gradient(inner, anchor)
    if not result.dim():
        raise _rejected("a gradient penalty needs a value with samples")
    rows = result.flatten(1) if result.dim() > 1 else result[:, None]
    if not score.center:  # no square root: its derivative at 0 is infinite
        return rows.square().sum(dim=1).mean()
    norms: torch.Tensor = torch.linalg.vector_norm(rows, dim=1)
    return (norms - score.center).square().mean()


def _out_of_range(index: int, count: int) -> ServiceError:
    return ServiceError(
        ErrorReason.OBJECTIVE_OUT_OF_RANGE,
        f"objective: no class {index}; the value has {count} classes, 0 to {count - 1}",
        class_count=str(count),
    )


def _rejected(problem: str) -> ServiceError:
    return ServiceError(ErrorReason.OBJECTIVE_REJECTED, f"objective: {problem}")
