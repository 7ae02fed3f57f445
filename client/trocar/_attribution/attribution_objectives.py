"""Attribution objectives: classes, parts of a batch, and per-sample scores beside the gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from trocar._request.scores import logit
from trocar_api.class_names import class_number
from trocar_api.v1 import objective_pb2 as pb

if TYPE_CHECKING:
    from trocar._attribution.scaling import Floats
    from trocar._base.tensors import Array
    from trocar._request.objectives import Objective

INPUT, OUTPUT = "/in", "/out"
IMAGES = "pixel_values"
"""The name that images have in transformers' models; they need not be the first parameter."""


def input_port(name: str) -> str:
    """Return the port of an input; of the first parameter where the name is empty."""
    return f"{INPUT}({name})" if name else INPUT


"""The selectors of a model's own input and output."""


def classes_of(objective: Objective, samples: int) -> tuple[int, ...] | None:
    """Return the class of each sample; None if the objective is not one class per sample.

    Raises:
        ValueError: There are other numbers of classes than of samples.
    """
    outcome = set()
    for term in objective.to_wire().terms:
        if term.WhichOneof("kind") != "class_score" or term.class_score.HasField("positions"):
            return None
        outcome.add(tuple(_classes(term.class_score, samples)))
    return outcome.pop() if len(outcome) == 1 else None


def numbered(objective: Objective, categories: Sequence[str]) -> Objective:
    """Return the same objective with the numbers of classes in place of their names.

    Raises:
        ValueError: There is no class of a name, or several.
    """
    terms = [replace(term, score=_numbered(term.score, categories)) for term in objective.terms]
    return replace(objective, terms=tuple(terms))


def is_sum_over_samples(objective: Objective) -> bool:
    """Whether each sample's gradient is independent of its batch."""
    return all(_is_sum(term) for term in objective.to_wire().terms)


def for_samples(objective: Objective, positions: Sequence[int], samples: int) -> Objective:
    """Return a sum over samples for a batch of these samples of another one.

    Args:
        objective: For a batch of `samples`.
        positions: Which samples; one may come more than once.
        samples: Number of samples.

    Raises:
        ValueError: There are other numbers of classes than of samples.
    """
    terms = [replace(term, score=_taken(term.score, positions, samples)) for term in objective.terms]
    return replace(objective, terms=tuple(terms))


def predicted(output: Array) -> Objective:
    """Return the sum of the logits of each sample's most likely class.

    Raises:
        ValueError: The model's output is not (batch, classes).
    """
    if output.ndim != 2 or not output.shape[1]:
        raise ValueError(
            f"the model's output has shape {output.shape}, not (batch, classes), so there is no predicted "
            "class; "
            "choose an objective with of=, for example trocar.logit(3)"
        )
    return logit(output.argmax(axis=1).tolist())


def score_selectors(objective: Objective) -> tuple[str, ...] | None:
    """Return the selectors of the values for `scores`; None if scores cannot be computed."""
    terms = objective.to_wire().terms
    kinds = {term.WhichOneof("kind") for term in terms}
    if kinds != {"class_score"} or any(term.class_score.HasField("positions") for term in terms):
        return None
    return tuple(dict.fromkeys(term.class_score.selector or OUTPUT for term in terms))


def scores(
    objective: Objective, values: Mapping[str, Array], positions: Sequence[int], samples: int
) -> Floats:
    """Return the objective of each sample of a batch, in float64.

    Args:
        objective: Of class scores alone.
        values: Values at each of `score_selectors`, for the batch; classes are the last dimension.
        positions: Which of the objective's samples each sample of the batch is.
        samples: Number of samples of the objective.

    Raises:
        ValueError: A value has no such class, or the numbers do not fit.
    """
    total = np.zeros(len(positions))
    for term in objective.to_wire().terms:
        score = term.class_score
        every = np.asarray(_classes(score, samples))
        value = values[score.selector or OUTPUT]
        weight = term.weight if term.HasField("weight") else 1.0
        total += weight * _class_scores(value, every[list(positions)], score.kind)
    return total


def _numbered(term: pb.ObjectiveTerm, categories: Sequence[str]) -> pb.ObjectiveTerm:
    if not term.class_score.class_names:
        return term
    message = pb.ObjectiveTerm()
    message.CopyFrom(term)
    score = message.class_score
    score.classes.extend(class_number(name, categories) for name in term.class_score.class_names)
    score.ClearField("class_names")
    return message


def _taken(term: pb.ObjectiveTerm, positions: Sequence[int], samples: int) -> pb.ObjectiveTerm:
    if len(term.class_score.classes) < 2:
        return term
    every = _classes(term.class_score, samples)
    message = pb.ObjectiveTerm()
    message.CopyFrom(term)
    del message.class_score.classes[:]
    message.class_score.classes.extend(every[position] for position in positions)
    return message


def _is_sum(term: pb.ObjectiveTerm) -> bool:
    kind = term.WhichOneof("kind")
    if kind == "class_score":  # of several classes for positions it is not known which are of which sample
        return not term.class_score.HasField("positions") or len(term.class_score.classes) == 1
    if kind == "value_score":
        is_sum = term.value_score.aggregate in (pb.AGGREGATE_UNSPECIFIED, pb.AGGREGATE_SUM)
        return is_sum and not term.value_score.reductions
    return False  # a loss has labels for its own batch, and a mean; a penalty is a mean


def _classes(score: pb.ClassScore, samples: int) -> list[int]:
    if len(score.classes) == 1:
        return list(score.classes) * samples
    if len(score.classes) != samples:
        raise ValueError(
            f"the objective names {len(score.classes)} classes for {samples} samples; "
            "name one, or one for each"
        )
    return list(score.classes)


def _class_scores(value: Array, classes: Array, kind: pb.ClassScoreKind.ValueType) -> Floats:
    """Return the score of each sample's class; positions are summed."""
    if value.ndim < 2 or len(value) != len(classes):
        raise ValueError(f"a value of shape {value.shape} has no classes for {len(classes)} samples")
    rows = value.astype(np.float64)
    if classes.size and not 0 <= classes.min() <= classes.max() < rows.shape[-1]:
        raise ValueError(f"there are {rows.shape[-1]} classes; asked for {classes.min()} to {classes.max()}")
    rows = _KINDS[kind](rows).reshape(len(value), -1, rows.shape[-1])
    result: Floats = rows[np.arange(len(value)), :, classes].sum(axis=1)
    return result


def _log_softmax(rows: Floats) -> Floats:
    with np.errstate(invalid="ignore"):
        shifted = rows - rows.max(axis=-1, keepdims=True)
        result: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


_KINDS: dict[pb.ClassScoreKind.ValueType, Callable[[Floats], Floats]] = {
    pb.CLASS_SCORE_KIND_UNSPECIFIED: lambda rows: rows,
    pb.CLASS_SCORE_KIND_LOGIT: lambda rows: rows,
    pb.CLASS_SCORE_KIND_PROBABILITY: lambda rows: np.exp(_log_softmax(rows)),
    pb.CLASS_SCORE_KIND_LOG_PROBABILITY: _log_softmax,
}
