"""Prediction count: predictions of an evaluation, and how many of them are correct."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trocar_server.training.spec.trainer_spec import LossSpec

_LEFT_OUT = -100  # torch's own `ignore_index`


@dataclass(frozen=True)
class PredictionCount:
    """Count of the predictions of a batch: of each sample, pixel or token one.

    Attributes:
        correct_count: Predictions that are right.
        label_count: Labels that they were compared with; without those that the loss ignores.
    """

    correct_count: int
    label_count: int


def prediction_count(
    losses: Sequence[LossSpec], output: Tensor | None, targets: Mapping[str, Tensor], class_dim: int = 1
) -> PredictionCount | None:
    """Count where the argmax over the classes is the target's class; None without class indices.

    The target is that of the first cross-entropy on the model's output, (batch, ...) without the classes.
    """
    if output is None:
        return None
    for term in losses:
        if term.name == "cross_entropy" and term.teacher is None and not term.selector:
            target = targets.get(term.target or next(iter(targets), ""))
            if target is None or target.is_floating_point() or target.dim() != output.dim() - 1:
                return None
            target = target.to(output.device, torch.int64)  # -100 would be 156 in uint8
            ignored = term.options.get("ignore_index", _LEFT_OUT)
            counts = target.ne(ignored if isinstance(ignored, int) else _LEFT_OUT)
            is_correct = (output.argmax(class_dim) == target) & counts
            return PredictionCount(int(is_correct.sum()), int(counts.sum()))
    return None
