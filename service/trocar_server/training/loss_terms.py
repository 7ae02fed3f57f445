"""The losses by name: torch's own functions with torch's own options.

    compute(LossSpec(name="cross_entropy", options={"label_smoothing": 0.1}), logits, labels)

# Note: [The dimension of classes]
Classes are dimension 1, as in torch's `cross_entropy`: (batch, classes), or (batch, classes, height, width)
for one label per pixel. Lists of numbers by class (`weight`, `pos_weight`) lie along it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trocar_server.training.loss_targets import number_dtype
from trocar_server.training.spec import LossSpec

WITHOUT_TARGET = frozenset(("l1_norm", "l2_norm"))
"""Losses of a value alone."""
WITH_TEACHER = frozenset(("mse", "l1", "huber", "kl_div"))
"""Losses that can be taken against another model's value."""


def compute(spec: LossSpec, value: Tensor, other: Tensor | None) -> Tensor:
    """Return one term of the loss, without its weight.

    Args:
        spec: Which.
        value: Of the trained model.
        other: The target, or the teacher's value; None for norms.
    """
    if other is None:
        return value.abs().mean() if spec.name == "l1_norm" else value.square().mean()
    return _TERMS[spec.name](value, other, spec)


def _cross_entropy(value: Tensor, target: Tensor, spec: LossSpec) -> Tensor:
    options: dict[str, Any] = dict(spec.options)
    if options.get("weight") is not None:
        options["weight"] = _numbers(options["weight"], value)
    return F.cross_entropy(value, target, **options)


def _bce(value: Tensor, target: Tensor, spec: LossSpec) -> Tensor:
    options: dict[str, Any] = dict(spec.options)
    for name in ("weight", "pos_weight"):
        if options.get(name) is not None:
            options[name] = _along_classes(_numbers(options[name], value), value)
    return F.binary_cross_entropy_with_logits(value, target, **options)


def _plain(function: Callable[..., Tensor]) -> Callable[[Tensor, Tensor, LossSpec], Tensor]:
    return lambda value, target, spec: function(value, target, **spec.options)


def _kl_div(value: Tensor, target: Tensor, spec: LossSpec) -> Tensor:
    options: dict[str, Any] = {"reduction": "batchmean", **spec.options}
    temperature = float(options.pop("temperature", 1.0))
    dim = min(1, value.ndim - 1)
    if spec.teacher is not None:
        target = F.softmax(target / temperature, dim)
    return F.kl_div(F.log_softmax(value / temperature, dim), target, **options) * temperature**2


def _numbers(option: Any, value: Tensor) -> Tensor:
    numbers = option if isinstance(option, list) else [option]
    return torch.tensor(numbers, dtype=number_dtype(value), device=value.device)


def _along_classes(numbers: Tensor, value: Tensor) -> Tensor:
    """Give a list by class the dimensions to lie along. See Note: [The dimension of classes]."""
    return numbers.reshape(-1, *[1] * (value.ndim - 2)) if numbers.numel() > 1 else numbers


_TERMS: dict[str, Callable[[Tensor, Tensor, LossSpec], Tensor]] = {
    "cross_entropy": _cross_entropy,
    "bce_with_logits": _bce,
    "mse": _plain(F.mse_loss),
    "l1": _plain(F.l1_loss),
    "huber": _plain(F.huber_loss),
    "kl_div": _kl_div,
}
