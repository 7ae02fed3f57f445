"""Prediction count: correct predictions of an evaluation."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from trocar_server.training.spec.trainer_spec import LossSpec

_LEFT_OUT = -100  # torch's own `ignore_index`


def correct_count(losses: Sequence[LossSpec], output: Tensor, targets: Mapping[str, Tensor]) -> int | None:
    """Count where the argmax of (batch, classes, ...) is the target's class; None without class indices.

    The target is that of the first cross-entropy on the model's output.
    """
    for term in losses:
        if term.name == "cross_entropy" and term.teacher is None and not term.selector:
            target = targets.get(term.target or next(iter(targets), ""))
            if target is None or target.is_floating_point() or target.dim() != output.dim() - 1:
                return None
            left_out = term.options.get("ignore_index", _LEFT_OUT)
            right = (output.argmax(1) == target.to(output.device)) & (target.to(output.device) != left_out)
            return int(right.sum())
    return None
