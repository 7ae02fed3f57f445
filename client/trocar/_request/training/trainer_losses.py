"""Losses of a trainer: terms, teachers, penalties on weights. Names and options are torch's own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from trocar._request.training.trainer_options import (
    Selectors,
    made_by,
    number,
    options_to_wire,
    selectors,
    text,
)
from trocar_api.v1 import trainer_pb2 as pb

LossName: TypeAlias = Literal[
    "cross_entropy",
    "bce_with_logits",
    "mse",
    "l1",
    "huber",
    "kl_div",
    "l1_norm",
    "l2_norm",
    "causal_lm",
    "token_cross_entropy",
    "contrastive",
    "contrastive_logits",
]
"""The names of a trainer's losses, for type checkers."""


@dataclass(frozen=True)
class Teacher:
    """A value of another hosted model on the same inputs; made by `teacher`."""

    model_id: str
    selector: str = ""


def teacher(model_id: str, selector: str = "") -> Teacher:
    """Return a teacher, which a loss term uses instead of a target.

    Args:
        model_id: The id of a loaded model.
        selector: Which of its values; its output when empty.
    """
    return Teacher(model_id, selector)


@dataclass(frozen=True)
class LossTerm:
    """One term of a trainer's loss; made by `loss_term`."""

    name: str
    weight: float = 1.0
    at: str = ""
    target: str = ""
    teacher: Teacher | None = None
    options: Mapping[str, object] = field(default_factory=dict)

    def to_wire(self) -> pb.LossSpec:
        """Return the message."""
        message = pb.LossSpec(
            name=text("name", self.name),
            weight=number("weight", self.weight),
            selector=text("at", self.at),
            target=text("target", self.target),
            options=options_to_wire(self.options),
        )
        if self.teacher is not None:
            message.teacher.CopyFrom(
                pb.TeacherSpec(model_id=self.teacher.model_id, selector=self.teacher.selector)
            )
        return message


def loss_term(
    name: LossName,
    *,
    weight: float = 1.0,
    at: str = "",
    target: str = "",
    teacher: Teacher | str | None = None,
    **options: object,
) -> LossTerm:
    """Return one term of a trainer's loss.

        losses=[trocar.loss_term("cross_entropy", label_smoothing=0.1),
                trocar.loss_term("kl_div", teacher="resnet50", temperature=4.0, weight=0.5)]

    Args:
        name: "cross_entropy", "bce_with_logits", "mse", "l1", "huber", "kl_div", or without a target
            "l1_norm" (mean absolute value) and "l2_norm" (mean square). For texts: "causal_lm" (token ids as
            targets, shifted by the server) and "token_cross_entropy" (a label per token), -100 for tokens to
            ignore; "contrastive" (vectors: the first half of the batch and the second are pairs; a fit
            needs `shuffle=False`) and "contrastive_logits" (scores (n, n), as in CLIP), without a target.
        weight: Factor in the sum.
        at: The value that the loss uses, for example "layer4"; the model's output when empty.
        target: The name of the target, if a batch has several.
        teacher: Another model, or `teacher(...)`, to compare with instead of a target.
        **options: torch's own: label_smoothing, weight (of the classes), ignore_index, delta, ...; with
            "kl_div" and a teacher, temperature. With "token_cross_entropy" and labels of words or spans,
            label_all_tokens (a word's other tokens have its class) and b_to_i (the class of I- for each
            class).
    """
    found = Teacher(teacher) if isinstance(teacher, str) else teacher
    if found is not None:
        made_by("teacher", found, Teacher, "give the id of a model, or trocar.teacher('resnet50', 'layer4')")
    return LossTerm(name, weight, at, target, found, options)


@dataclass(frozen=True)
class Regularizer:
    """A penalty on weights; made by `regularizer`."""

    parameters: tuple[str, ...]
    norm: str
    weight: float

    def to_wire(self) -> pb.RegularizerSpec:
        """Return the message."""
        return pb.RegularizerSpec(
            parameters=self.parameters, norm=text("norm", self.norm), weight=number("weight", self.weight)
        )


def regularizer(parameters: Selectors, weight: float, *, norm: Literal["l1", "l2"] = "l2") -> Regularizer:
    """Return a penalty on weights: weight times the sum of their squares ("l2") or absolute values ("l1").

    Args:
        parameters: Modules or parameters by selector.
        weight: Factor.
        norm: "l2" or "l1".
    """
    return Regularizer(tuple(selectors(parameters, "parameters")), norm, weight)
