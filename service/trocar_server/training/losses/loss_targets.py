"""Loss targets: shape and value checks, and conversion to the dtype of the loss."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.losses import LOSSES, number_dtype
from trocar_server.training.spec.trainer_spec import LossSpec

Shape = Sequence[int | None]
"""Sizes of a value, batch first; None where unknown."""


def is_labels(spec: LossSpec, target: Tensor) -> bool:
    """Whether a target holds class indices, not values to approximate."""
    return LOSSES[spec.name].takes_indices and not target.is_floating_point()


def converted(spec: LossSpec, target: Tensor, value: Tensor) -> Tensor:
    """Return a target as its loss takes it: labels as int64, all others in the dtype of the value."""
    dtype = torch.int64 if is_labels(spec, target) else number_dtype(value)
    return target.to(value.device, dtype)


def check_layout(spec: LossSpec, target: Tensor, size: int, shape: Shape | None) -> None:
    """Refuse a target before the pass, by its dtype and shape.

    Args:
        spec: The loss.
        target: The batch's target.
        size: The batch's size.
        shape: Shape of the value that it is compared with, as far as known.

    Raises:
        ServiceError: `TARGET_REJECTED`.
    """
    if target.is_complex():
        raise _rejected(spec, f"has dtype {_dtype(target)}; send labels or real numbers")
    if target.ndim == 0 or target.shape[0] != size:
        got = "a single number" if target.ndim == 0 else f"{target.shape[0]} entries"
        raise _rejected(spec, f"has {got} for a batch of {size}; its first dimension is the batch")
    if shape is not None:
        check_shape(spec, target, shape)


def check_values(spec: LossSpec, target: Tensor, shape: Shape | None) -> None:
    """Refuse a target before the pass, by its values.

    Args:
        spec: The loss.
        target: The batch's target, of a valid dtype and shape.
        shape: Shape of the value that it is compared with, as far as known.

    Raises:
        ServiceError: `TARGET_REJECTED`: numbers that are not finite, labels out of range.
    """
    if target.is_floating_point() and not torch.isfinite(target).all():
        raise _rejected(spec, "has numbers that are not finite (NaN or infinity)")
    if LOSSES[spec.name].takes_indices:
        if not target.is_floating_point():
            _check_classes(spec, target, shape)
    elif spec.name == "bce_with_logits":
        _check_range(spec, target)
    elif spec.name == "kl_div":
        _check_probabilities(spec, target)


def check_shape(spec: LossSpec, target: Tensor, shape: Shape) -> None:
    """Refuse a target whose shape does not fit the value's shape.

    Raises:
        ServiceError: `TARGET_REJECTED`, with the expected shape.
    """
    if LOSSES[spec.name].of_tokens:
        _check_token_labels(spec, target, shape)
        return
    if spec.name == "cross_entropy":
        labels = (*shape[:1], *shape[2:])
        if is_labels(spec, target):
            if not _fits(tuple(target.shape), labels):
                raise _rejected(
                    spec,
                    f"has shape {tuple(target.shape)}; labels for values of shape {_shown(shape)} have shape "
                    f"{_shown(labels)}",
                )
            return
        if _fits(tuple(target.shape), labels) and not _fits(tuple(target.shape), shape):
            raise _rejected(
                spec,
                f"has dtype {_dtype(target)}; labels are integers, soft targets have shape {_shown(shape)}",
            )
    if not _fits(tuple(target.shape), shape):
        raise _rejected(
            spec, f"has shape {tuple(target.shape)}; it must be that of the value, {_shown(shape)}"
        )


def _check_token_labels(spec: LossSpec, target: Tensor, shape: Shape) -> None:
    if not is_labels(spec, target):
        raise _rejected(spec, f"has dtype {_dtype(target)}; labels are integers")
    if not _fits(tuple(target.shape), shape[:-1]):
        raise _rejected(
            spec,
            f"has shape {tuple(target.shape)}; labels for values of shape {_shown(shape)} have shape "
            f"{_shown(shape[:-1])}",
        )


def _check_classes(spec: LossSpec, target: Tensor, shape: Shape | None) -> None:
    ignored = spec.options.get("ignore_index", -100)
    labels = target.to(torch.int64)
    is_counted = labels.ne(int(ignored) if isinstance(ignored, int) else -100)
    if target.dtype == torch.uint64:  # values over 2^63 became negative
        is_counted |= labels < 0
    if spec.name == "causal_lm":  # nothing comes before the first token, so it is never predicted
        is_counted[..., :1] = False
    labels = labels[is_counted]
    if not labels.numel():
        raise _rejected(spec, f"has only labels equal to ignore_index ({ignored}), so there is no loss")
    least, most = labels.aminmax()
    low, high = int(least), int(most)
    count = None
    if shape is not None:
        count = shape[-1] if LOSSES[spec.name].of_tokens else shape[1] if len(shape) > 1 else shape[0]
    if low < 0 or (count is not None and high >= count):
        top = "at least 0" if count is None else f"from 0 to {count - 1}: the model has {count} classes"
        raise _rejected(spec, f"has labels from {low} to {high}; they must be {top}")


def _check_range(spec: LossSpec, target: Tensor) -> None:
    if bool(((target < 0) | (target > 1)).any()):
        raise _rejected(spec, "has numbers outside of 0 to 1; bce_with_logits takes probabilities")


def _check_probabilities(spec: LossSpec, target: Tensor) -> None:
    if not target.is_floating_point():
        raise _rejected(spec, f"has dtype {_dtype(target)}; kl_div takes probabilities")
    if spec.options.get("log_target"):
        target = target.exp()
    sums = target.double().sum(1) if target.ndim > 1 else target.double().sum(0)
    if bool((target < 0).any()) or bool(((sums - 1).abs() > 1e-2).any()):
        raise _rejected(
            spec, "is not a list of probabilities: each is at least 0, and those of a sample sum to 1"
        )


def _fits(shape: tuple[int, ...], known: Shape) -> bool:
    if shape == tuple(known):
        return True
    return len(shape) == len(known) and all(
        wanted is None or size == wanted for size, wanted in zip(shape, known, strict=True)
    )


def _shown(shape: Shape) -> str:
    unknown = ("batch", *"?" * len(shape))
    sizes = ", ".join(name if size is None else str(size) for name, size in zip(unknown, shape, strict=False))
    return f"({sizes}{',' if len(shape) == 1 else ''})"


def _dtype(target: Tensor) -> str:
    return str(target.dtype).removeprefix("torch.")


def _rejected(spec: LossSpec, what: str) -> ServiceError:
    who = f"the target '{spec.target}'" if spec.target else "the target"
    return ServiceError(ErrorReason.TARGET_REJECTED, f"{who} of {spec.name} {what}", loss=spec.name)
