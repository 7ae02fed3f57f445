"""Application of reductions in order, to a value or to its signature."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.tensors.reductions import linear, pooling, selecting
from trocar_server.tensors.reductions.lens import Head, lens
from trocar_server.tensors.reductions.padding import Own
from trocar_server.tensors.reductions.positions import Positions
from trocar_server.tensors.reductions.reduction import (
    Crop,
    Gram,
    Grid,
    Index,
    Lens,
    Pca,
    Peak,
    Pool,
    PooledNorm,
    Projection,
    Readout,
    Reduction,
    Spans,
    Take,
    TokenRows,
    TopK,
    operand_specs,
)
from trocar_server.tensors.reductions.reduction_stage import Stage, rejected

MAX_REDUCTIONS = 16


@dataclass(frozen=True)
class Reduced:
    """The result of reductions.

    Attributes:
        value: The result. It may share memory with the input.
        companions: Further results, by role: `indices`, int64, of a top-k or peak.
        channel_dim: Channel dimension of the result, from 0; None without one.
        samples_dim: The dimension of the samples of the result, from 0; None without one.
        extra_bytes: Peak memory in bytes besides the input, the result included. Views count as if they
        were copies, workspaces of kernels do not count.
    """

    value: torch.Tensor
    companions: dict[str, torch.Tensor] = field(default_factory=dict)
    channel_dim: int | None = None
    samples_dim: int | None = 0
    extra_bytes: int = 0
    own: Own | None = None
    """Which positions of the result are no padding; None where all count. See Note: [Padding]."""
    is_filled: bool = False
    """Whether the mask is of filling: places that hold no element of the input."""


def check_reductions(reductions: Sequence[Reduction]) -> None:
    """Check reductions without a value.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, too many, or one after a top-k, lens or peak, whose `indices`
        would then no longer match the values.
    """
    if len(reductions) > MAX_REDUCTIONS:
        raise ServiceError(
            ErrorReason.REDUCTION_REJECTED, f"{len(reductions)} reductions; the most is {MAX_REDUCTIONS}"
        )
    after = next(
        (i for i, entry in enumerate(reductions[:-1]) if isinstance(entry, TopK | Lens | Peak)), None
    )
    if after is not None:
        last = reductions[after]
        kind = "top-k" if isinstance(last, TopK) else "lens" if isinstance(last, Lens) else "peak"
        raise ServiceError(
            ErrorReason.REDUCTION_REJECTED,
            f"{reductions[after + 1]} comes after {reductions[after]}; a {kind} must be the last reduction",
        )


def reduce_value(
    value: torch.Tensor,
    reductions: Sequence[Reduction],
    channel_dim: int | None = None,
    operands: Sequence[torch.Tensor] = (),
    check: Callable[[], None] = lambda: None,
    own: Own | None = None,
    samples_dim: int | None = 0,
    head: Head | None = None,
) -> Reduced:
    """Apply reductions in order.

        reduce_value(logits, [TopK(5)]).companions["indices"]

    Args:
        value: A dense tensor on any device.
        reductions: The reductions, at most 16. A top-k must be the last.
        channel_dim: Channel dimension of `value`, negative from the end; by default the
            last of rank 3, otherwise 1. See Note: [Channel dimension through reductions].
        operands: The tensors of `operand_specs(reductions)`, in order, on any device.
        check: Called between steps; raises to stop.
        own: Which positions are no padding; None where all are. See Note: [Padding].
        samples_dim: The dimension of the samples; None without one. Reductions of each sample move it
            to the front.
        head: What follows the last block of the model, for a lens.

    Raises:
        ServiceError: `REDUCTION_REJECTED`, a reduction does not fit.
        ValueError: `operands` are not those of `operand_specs`.
    """
    check_reductions(reductions)
    _check_operands(reductions, operands)
    if reductions and (value.layout is not torch.strided or value.is_quantized):
        raise rejected(value, reductions[0], "only dense values can be reduced; leave the reductions out")
    stage = Stage.of(value, channel_dim, own, samples_dim)
    extra_bytes = used = held_bytes = 0
    for reduction in reductions:
        check()
        taken = operands[used : used + len(operand_specs([reduction]))]
        stage = _apply(stage, reduction, taken, check, head)
        used += len(taken)
        extra_bytes = max(extra_bytes, held_bytes + stage.workspace_bytes + stage.byte_count)
        held_bytes = stage.byte_count
    return Reduced(
        stage.value,
        stage.companions,
        stage.channel_dim,
        stage.samples_dim,
        extra_bytes,
        None if stage.mask is None else Own(stage.mask_dims, stage.mask),
        stage.is_filled,
    )


def reduced_signature(
    shape: Sequence[int],
    dtype: torch.dtype,
    reductions: Sequence[Reduction],
    channel_dim: int | None = None,
    samples_dim: int | None = 0,
) -> Reduced:
    """Infer the result of reductions for a signature: tensors on the meta device, nothing allocated.

        reduced_signature((8, 2048, 7, 7), torch.float32, [Pool(PoolKind.AVG)]).value.shape  # (8, 2048)

    Raises:
        ServiceError: `REDUCTION_REJECTED`, a reduction does not fit.
    """
    value = torch.empty(tuple(shape), dtype=dtype, device="meta")
    operands = [
        torch.empty(spec.shape, dtype=spec.dtype, device="meta") for spec in operand_specs(reductions)
    ]
    return reduce_value(value, reductions, channel_dim, operands, samples_dim=samples_dim)


def _apply(
    stage: Stage,
    reduction: Reduction,
    operands: Sequence[torch.Tensor],
    check: Callable[[], None],
    head: Head | None,
) -> Stage:
    match reduction:
        case Index() | Take() | Spans() | Positions() | TokenRows() | Crop() | Grid() | TopK():
            return selecting.select(stage, reduction)
        case Pool() | Peak() | PooledNorm():
            return pooling.pooled(stage, reduction)
        case Gram():
            return linear.gram(stage, reduction)
        case Projection():
            return linear.project(stage, reduction, check)
        case Pca():
            return linear.principal_components(stage, reduction, operands)
        case Readout():
            return linear.read(stage, reduction, operands)
        case Lens():
            return lens(stage, reduction, head)


def _check_operands(reductions: Sequence[Reduction], operands: Sequence[torch.Tensor]) -> None:
    wanted = [(spec.dtype, spec.shape) for spec in operand_specs(reductions)]
    given = [(tensor.dtype, tuple(tensor.shape)) for tensor in operands]
    if wanted != given:
        raise ValueError(f"operands are {given}, but the reductions need {wanted}")
