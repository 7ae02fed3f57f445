"""Reductions in order, on a value or on the form of one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.reductions import linear, pooling, selecting
from trocar_server.reductions.reduction import (
    Crop,
    Gram,
    Index,
    Pca,
    Pool,
    Projection,
    Reduction,
    Take,
    TopK,
    constant_specs,
)
from trocar_server.reductions.stage import Stage, rejected

MAX_REDUCTIONS = 16


@dataclass(frozen=True)
class Reduced:
    """What reductions made of a value.

    Attributes:
        value: The result. It may share the memory of what it was made of.
        companions: What else came out, by role: `indices`, int64, of a top-k.
        channel_dim: The dimension of the result that holds the channels, from 0; None where there is none.
        has_samples: Whether dimension 0 of the result holds the samples.
        extra_bytes: The most bytes held at once beside the value given, the result included. Views count
            as if they were copies, workspaces of kernels do not count.
    """

    value: torch.Tensor
    companions: dict[str, torch.Tensor] = field(default_factory=dict)
    channel_dim: int | None = None
    has_samples: bool = True
    extra_bytes: int = 0


def check_reductions(reductions: Sequence[Reduction]) -> None:
    """Check what can be told without a value.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, too many, or one after a top-k, whose `indices` would then no
            longer belong to the values.
    """
    if len(reductions) > MAX_REDUCTIONS:
        raise ServiceError(
            ErrorReason.REDUCTION_REJECTED, f"{len(reductions)} reductions; the most is {MAX_REDUCTIONS}"
        )
    after = next((i for i, reduction in enumerate(reductions[:-1]) if isinstance(reduction, TopK)), None)
    if after is not None:
        raise ServiceError(
            ErrorReason.REDUCTION_REJECTED,
            f"{reductions[after + 1]} comes after {reductions[after]}; a top-k must be the last reduction",
        )


def reduce_value(
    value: torch.Tensor,
    reductions: Sequence[Reduction],
    channel_dim: int | None = None,
    constants: Sequence[torch.Tensor] = (),
    check: Callable[[], None] = lambda: None,
) -> Reduced:
    """Apply reductions in order.

        reduce_value(logits, [TopK(5)]).companions["indices"]

    Args:
        value: A dense tensor on any device.
        reductions: What to do, at most 16. A top-k must be the last.
        channel_dim: Which dimension of `value` holds the channels, negative from the end; by default the
            last of rank 3, otherwise 1. See Note: [The channels stay the channels].
        constants: The tensors of `constant_specs(reductions)`, in order, on any device.
        check: Called between steps; raises to stop.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, a reduction does not fit.
        ValueError: `constants` are not those of `constant_specs`.
    """
    check_reductions(reductions)
    _check_constants(reductions, constants)
    if reductions and (value.layout is not torch.strided or value.is_quantized):
        raise rejected(value, reductions[0], "only dense values can be reduced; leave the reductions out")
    stage = Stage.of(value, channel_dim)
    extra_bytes = used = held_bytes = 0
    for reduction in reductions:
        check()
        own = constants[used : used + len(constant_specs([reduction]))]
        stage = _apply(stage, reduction, own, check)
        used += len(own)
        extra_bytes = max(extra_bytes, held_bytes + stage.workspace_bytes + stage.byte_count)
        held_bytes = stage.byte_count
    return Reduced(stage.value, stage.companions, stage.channel_dim, stage.has_samples, extra_bytes)


def reduced_form(
    shape: Sequence[int], dtype: torch.dtype, reductions: Sequence[Reduction], channel_dim: int | None = None
) -> Reduced:
    """Say what reductions make of a value of this form: tensors on the meta device, nothing allocated.

        reduced_form((8, 2048, 7, 7), torch.float32, [Pool(PoolKind.AVG)]).value.shape  # (8, 2048)

    Raises:
        ServiceError: `REDUCTION_REJECTED`, a reduction does not fit.
    """
    value = torch.empty(tuple(shape), dtype=dtype, device="meta")
    constants = [
        torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in constant_specs(reductions)
    ]
    return reduce_value(value, reductions, channel_dim, constants)


def _apply(
    stage: Stage, reduction: Reduction, constants: Sequence[torch.Tensor], check: Callable[[], None]
) -> Stage:
    match reduction:
        case Index():
            return selecting.index(stage, reduction)
        case Take():
            return selecting.take(stage, reduction)
        case Crop():
            return selecting.crop(stage, reduction)
        case Pool():
            return pooling.pool(stage, reduction)
        case TopK():
            return selecting.top_k(stage, reduction)
        case Gram():
            return linear.gram(stage, reduction)
        case Projection():
            return linear.project(stage, reduction, check)
        case Pca():
            return linear.principal_components(stage, reduction, constants)


def _check_constants(reductions: Sequence[Reduction], constants: Sequence[torch.Tensor]) -> None:
    wanted = [(spec.dtype, spec.shape) for spec in constant_specs(reductions)]
    given = [(tensor.dtype, tuple(tensor.shape)) for tensor in constants]
    if wanted != given:
        raise ValueError(f"constants are {given}, but the reductions need {wanted}")
