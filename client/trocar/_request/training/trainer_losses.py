"""Losses of a trainer: terms, teachers, penalties on weights. Names and options are torch's own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from trocar._base.delegation import explained
from trocar._request.inputs import ArrayLike
from trocar._request.operands import Numbers, class_factors, is_number
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
    "policy_gradient",
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


@explained
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


@explained
def loss_term(
    name: LossName,
    *,
    weight: float = 1.0,
    class_weights: Numbers | ArrayLike | None = None,
    at: str = "",
    target: str = "",
    teacher: Teacher | str | None = None,
    **options: object,
) -> LossTerm:
    """Return one term of a trainer's loss.

        losses=[trocar.training.loss_term("cross_entropy", label_smoothing=0.1),
                trocar.training.loss_term("kl_div", teacher="resnet50", temperature=4.0, weight=0.5)]

    Args:
        name: "cross_entropy", "bce_with_logits", "mse", "l1", "huber", "kl_div", or without a target
            "l1_norm" (mean absolute value) and "l2_norm" (mean square). For texts: "causal_lm" (token ids as
            targets, shifted by the server) and "token_cross_entropy" (a label per token), -100 for tokens to
            ignore; "policy_gradient" (the targets of a step are a dict: token ids as for "causal_lm", -100
            for those that were not drawn; `advantages`, one for each token or sample; and `logprobs` of the
            tokens, if the weights have changed since); "contrastive" (vectors: the first half of the batch
            and the second are pairs; a fit needs `shuffle=False`) and "contrastive_logits" (scores (n, n), as
            in CLIP), without a target.
        weight: Factor in the sum.
        class_weights: A factor for each class, torch's `weight`, for "cross_entropy", "token_cross_entropy"
            and "bce_with_logits".
        at: The value that the loss uses, for example "layer4"; the model's output when empty.
        target: The name of the target, if a batch has several.
        teacher: Another model, or `teacher(...)`, to compare with instead of a target.
        **options: torch's own: label_smoothing, ignore_index, pos_weight, delta, ...; with
            "kl_div" and a teacher, temperature; with "policy_gradient" and logprobs, clip, as in PPO. With
            "token_cross_entropy" and labels of words or spans, label_all_tokens (a word's other tokens have
            its class) and b_to_i (the class of I- for each class).

    Raises:
        TypeError: `weight` is not a number, `class_weights` not one for each class, or the teacher neither of
            both.
        ValueError: Class weights are negative, NaN or infinite.
    """
    if not is_number(weight):
        raise TypeError(
            f"weight is a {type(weight).__name__}; it is the factor of the term, one number: weights of the "
            "classes are class_weights=[...]"
        )
    if class_weights is not None:
        options = {"class_weights": class_factors(class_weights), **options}
    result = Teacher(teacher) if isinstance(teacher, str) else teacher
    if result is not None:
        made_by(
            "teacher",
            result,
            Teacher,
            "give the id of a model, or trocar.training.teacher('resnet50', 'layer4')",
        )
    return LossTerm(name, weight, at, target, result, options)


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


@explained
def regularizer(parameters: Selectors, weight: float, *, norm: Literal["l1", "l2"] = "l2") -> Regularizer:
    """Return a penalty on weights: weight times the sum of their squares ("l2") or absolute values ("l1").

    Args:
        parameters: Modules or parameters by selector.
        weight: Factor.
        norm: "l2" or "l1".
    """
    return Regularizer(tuple(selectors(parameters, "parameters")), norm, weight)
