"""Losses by name, for objectives and trainers: torch's own functions with torch's own options.

    LOSSES["cross_entropy"].compute(logits, labels, label_smoothing=0.1)

# Note: [The dimension of classes]
These functions take classes in dimension 1, as torch's `cross_entropy`: (batch, classes), or (batch, classes,
height, width) for one label per pixel; a trainer moves them there from where the value's layout says.
Per-class lists (`class_weights`, torch's `weight`, and `pos_weight`) apply along it. Losses of tokens take
classes last, and so does a trainer's `kl_div` on a model of texts; see Note: [Divergence of tokens].
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

CLASS_WEIGHTS = "class_weights"
"""The option of a factor for each class; `weight` is the factor of a whole term."""


@dataclass(frozen=True)
class NamedLoss:
    """One loss.

    Attributes:
        compute: The function of the value, the target and the options; of value and options without targets.
        options: Names of the options that a trainer may give.
        has_target: Whether it compares with a target.
        takes_teacher: Whether another model's value can be the target.
        takes_indices: Whether a target of integers holds class indices.
    """

    compute: Callable[..., Tensor]
    options: tuple[str, ...] = ("reduction",)
    has_target: bool = True
    takes_teacher: bool = False
    takes_indices: bool = False
    of_tokens: bool = False
    """Whether classes are the last dimension: (batch, tokens, classes)."""
    layout_options: tuple[str, ...] = ()
    """Names of further options of a trainer: how labels are laid out, which the function does not take."""
    further_targets: tuple[str, ...] = ()
    """Names of further targets of a trainer's batch, numbers for each label or sample: keywords of `compute`.
    The first has to be there."""


def number_dtype(value: Tensor) -> torch.dtype:
    """Return the dtype for numeric targets: the value's own; under autocast, which widens it, float32."""
    is_half = value.dtype in (torch.bfloat16, torch.float16)
    is_widened = is_half and torch.is_autocast_enabled(value.device.type)
    return torch.float32 if is_widened else value.dtype


def kl_div_of_logits(
    value: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    is_teacher: bool = False,
    reduction: str = "batchmean",
    log_target: bool = False,
) -> Tensor:
    """Return the divergence of logits from probabilities, or from a teacher's logits.

    Both logits are divided by the temperature, and the result is multiplied by its square.
    """
    dim = min(1, value.ndim - 1)
    if is_teacher:
        target = F.softmax(target / temperature, dim)
    logs = F.log_softmax(value / temperature, dim)
    return F.kl_div(logs, target, reduction=reduction, log_target=log_target) * temperature**2


def _cross_entropy(value: Tensor, target: Tensor, class_weights: Any = None, **options: Any) -> Tensor:
    weights = None if class_weights is None else _numbers(class_weights, value)
    return F.cross_entropy(value, target, weights, **options)


def _nll(value: Tensor, target: Tensor, class_weights: Any = None, **options: Any) -> Tensor:
    weights = None if class_weights is None else _numbers(class_weights, value)
    return F.nll_loss(value, target, weights, **options)


def _bce_with_logits(
    value: Tensor, target: Tensor, class_weights: Any = None, pos_weight: Any = None, **options: Any
) -> Tensor:
    given = {"weight": class_weights, "pos_weight": pos_weight}
    along: dict[str, Any] = {
        name: _along_classes(_numbers(numbers, value), value)
        for name, numbers in given.items()
        if numbers is not None
    }
    return F.binary_cross_entropy_with_logits(value, target, **along, **options)


def _numbers(option: float | list[float], value: Tensor) -> Tensor:
    numbers = option if isinstance(option, list) else [option]
    return torch.tensor(numbers, dtype=number_dtype(value), device=value.device)


def _along_classes(numbers: Tensor, value: Tensor) -> Tensor:
    """Reshape per-class numbers to broadcast along the classes. See Note: [The dimension of classes]."""
    return numbers.reshape(-1, *[1] * (value.ndim - 2)) if numbers.numel() > 1 else numbers


def token_cross_entropy(value: Tensor, target: Tensor, class_weights: Any = None, **options: Any) -> Tensor:
    """Return the cross-entropy of (batch, tokens, classes) with labels (batch, tokens).

    Labels of `ignore_index` (-100) do not count. As `ForTokenClassification` of transformers (5.23).
    """
    return _cross_entropy(value.reshape(-1, value.shape[-1]), target.reshape(-1), class_weights, **options)


def causal_lm(value: Tensor, target: Tensor, ignore_index: int = -100, **options: Any) -> Tensor:
    """Return the cross-entropy of each token's logits with the next token, in float32.

    Args:
        value: Logits (batch, tokens, vocabulary).
        target: Token ids (batch, tokens), not shifted; `ignore_index` for those that do not count.
        ignore_index: See there.
        **options: Those of `cross_entropy`.

    As `ForCausalLMLoss` of transformers (5.23): the last token is compared with `ignore_index`, so that the
    logits need no copy.
    """
    following = F.pad(target, (0, 1), value=ignore_index)[..., 1:].reshape(-1)
    logits = value.float().reshape(-1, value.shape[-1])
    return F.cross_entropy(logits, following, ignore_index=ignore_index, **options)


def policy_gradient(
    value: Tensor,
    target: Tensor,
    advantages: Tensor,
    logprobs: Tensor | None = None,
    clip: float | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Tensor:
    """Return the loss whose gradient is that of the policy: likelier tokens where the advantage is positive.

    Args:
        value: Logits (batch, tokens, vocabulary).
        target: Token ids (batch, tokens), not shifted; `ignore_index` for those that were not drawn.
        advantages: Of each token (batch, tokens), at its own place, or of each sample (batch,).
        logprobs: Logarithms of the tokens' probabilities when they were drawn, at their own places
            (batch, tokens). With these the loss is minus ratio times advantage, the ratio that of the
            probabilities now and then (importance sampling); without, minus the logarithm times advantage.
        clip: How far a ratio may move from 1, as in PPO (arXiv:1707.06347, equation 7); anywhere when None.
        ignore_index: See there.
        reduction: "mean" over the tokens that count, or "sum".
    """
    following, is_counted = target[..., 1:], target[..., 1:] != ignore_index
    logits = value[..., :-1, :].float().log_softmax(-1)
    logs = logits.gather(-1, following.where(is_counted, following.new_zeros(())).unsqueeze(-1)).squeeze(-1)
    gains = (advantages.unsqueeze(-1) if advantages.ndim == 1 else advantages[..., 1:]).float()
    if logprobs is None:
        losses = -logs * gains
    else:
        ratio = (logs - logprobs[..., 1:].float()).where(is_counted, logs.new_zeros(())).exp()
        losses = -ratio * gains
        if clip is not None:
            losses = torch.maximum(losses, -ratio.clamp(1.0 - clip, 1.0 + clip) * gains)
    total = losses.where(is_counted, losses.new_zeros(())).sum()
    return total if reduction == "sum" else total / is_counted.sum().clamp(min=1)


def contrastive(value: Tensor, scale: float = 20.0, is_symmetric: bool = False) -> Tensor:
    """Return the InfoNCE loss of pairs: of n rows, row i and row i + n / 2 are a pair.

    The scores are cosines times `scale`; the other pairs of the batch are the negatives. As
    `MultipleNegativesRankingLoss` of sentence-transformers (6.2); `is_symmetric` adds the direction from the
    second to the first and takes the mean.

    Raises:
        ValueError: The value is not (batch, width) with an even batch.
    """
    if value.ndim != 2 or value.shape[0] % 2:
        raise ValueError(f"pairs are the halves of a value (batch, width), not of {tuple(value.shape)}")
    first, second = F.normalize(value, dim=1).chunk(2)
    return contrastive_logits(first @ second.T * scale, is_symmetric=is_symmetric)


def contrastive_logits(value: Tensor, is_symmetric: bool = True) -> Tensor:
    """Return the cross-entropy of scores (n, n) with their diagonal, as CLIP's loss on `logits_per_text`.

    Raises:
        ValueError: The value is not square.
    """
    if value.ndim != 2 or value.shape[0] != value.shape[1]:
        raise ValueError(f"scores of pairs are (n, n), not {tuple(value.shape)}")
    labels = torch.arange(len(value), device=value.device)
    forward = F.cross_entropy(value, labels)
    return (forward + F.cross_entropy(value.t(), labels)) / 2.0 if is_symmetric else forward


LOSSES: dict[str, NamedLoss] = {
    "cross_entropy": NamedLoss(
        _cross_entropy, (CLASS_WEIGHTS, "ignore_index", "reduction", "label_smoothing"), takes_indices=True
    ),
    "nll": NamedLoss(_nll, (CLASS_WEIGHTS, "reduction"), takes_indices=True),
    "bce_with_logits": NamedLoss(_bce_with_logits, (CLASS_WEIGHTS, "pos_weight", "reduction")),
    "mse": NamedLoss(F.mse_loss, takes_teacher=True),
    "l1": NamedLoss(F.l1_loss, takes_teacher=True),
    "smooth_l1": NamedLoss(F.smooth_l1_loss),
    "huber": NamedLoss(F.huber_loss, ("reduction", "delta"), takes_teacher=True),
    "kl_div": NamedLoss(kl_div_of_logits, ("reduction", "temperature", "log_target"), takes_teacher=True),
    "token_cross_entropy": NamedLoss(
        token_cross_entropy,
        (CLASS_WEIGHTS, "ignore_index", "reduction", "label_smoothing"),
        takes_indices=True,
        of_tokens=True,
        layout_options=("label_all_tokens", "b_to_i"),
    ),
    "causal_lm": NamedLoss(
        causal_lm, ("ignore_index", "reduction", "label_smoothing"), takes_indices=True, of_tokens=True
    ),
    "policy_gradient": NamedLoss(
        policy_gradient,
        ("ignore_index", "reduction", "clip"),
        takes_indices=True,
        of_tokens=True,
        further_targets=("advantages", "logprobs"),
    ),
    "contrastive": NamedLoss(contrastive, ("scale", "is_symmetric"), has_target=False),
    "contrastive_logits": NamedLoss(contrastive_logits, ("is_symmetric",), has_target=False),
    "l1_norm": NamedLoss(lambda value: value.abs().mean(), (), has_target=False),
    "l2_norm": NamedLoss(lambda value: value.square().mean(), (), has_target=False),
}
"""An objective takes those of its `LossKind`, a trainer those of its spec."""
