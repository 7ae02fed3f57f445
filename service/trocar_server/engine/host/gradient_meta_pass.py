"""Gradient meta pass: peak memory and available gradients of a pass, without data.

On the meta device autograd builds the same graph and keeps the same tensors for the backward pass, so the
live bytes are those of the real pass; see `surgery.recording.liveness`.
"""

from collections.abc import Sequence

import torch
from torch import nn

from trocar_server.engine.execute.collecting import EditMissedError, NoGradientError, PassSpec, collect
from trocar_server.engine.request.plan import Plan, Signature
from trocar_server.engine.resolve.planner import MetaPassResult, Resolved
from trocar_server.errors import ServiceError
from trocar_server.forward_signature import ForwardSignature
from trocar_server.surgery import PassGuard
from trocar_server.surgery.recording.liveness import LiveBytes, fused_attention
from trocar_server.surgery.recording.writes import WriteWatch


def run_meta_pass(
    meta: nn.Module,
    forward: ForwardSignature,
    plan: Plan,
    resolved: Resolved,
    signature: Signature,
    guard: PassGuard,
) -> MetaPassResult | None:
    """Run a plan's forward and backward pass on the meta device.

    Returns:
        The result, or None where an operator has no meta kernel: only the real pass can tell.

    Raises:
        ServiceError: Errors of edits or objective.
        EditMissedError: See `collect`.
        NoGradientError: See `collect`.
        PassAborted: The guard stopped it.
    """
    arguments = forward.called(
        [entry.name for entry in signature], [entry.make("meta") for entry in signature]
    )
    operands = [[_empty(s.shape, s.dtype) for s in request.edit.operands] for request in plan.edits]
    labels = [_empty(spec.shape, spec.dtype) for spec in plan.objective_operands]
    swaps = [entry for entry in resolved.surgery.edits if entry.swap]
    result = {e.swap.key: _empty(e.leaf.shape or (), e.leaf.dtype) for e in swaps if e.swap and e.swap.source}
    pass_spec = make_pass_spec(resolved, operands, labels, result)
    watch, live = WriteWatch(), LiveBytes()
    watch.live = live
    attention = {torch.ops.aten._softmax.default}  # whether the model has attention is not known
    try:
        with torch.no_grad(), watch, fused_attention(live, attention):
            collected = collect(meta, arguments, pass_spec, guard)
    except (ServiceError, EditMissedError, NoGradientError):
        raise
    except Exception:  # noqa: BLE001 - torch and the model may raise anything on meta
        return None
    wanted = {entry.target.name for entry in resolved.targets if entry.target.is_gradient}
    return MetaPassResult(live.peak, frozenset(wanted - collected.values.keys()))


def make_pass_spec(
    resolved: Resolved,
    operands: Sequence[Sequence[torch.Tensor]],
    labels: Sequence[torch.Tensor],
    outcome: dict[str, torch.Tensor],
) -> PassSpec:
    """Return the specification of a pass for a resolved plan.

    Args:
        resolved: The plan.
        operands: The tensors of each edit request, by its position.
        labels: The tensors of the objective.
        outcome: Values for swaps from other passes, by key.
    """
    surgery = resolved.surgery
    gradients = [entry.target for entry in resolved.targets if entry.target.is_gradient]
    values = [surgery.actual(entry.target) for entry in resolved.targets if not entry.target.is_gradient]
    if surgery.is_nothing:
        return PassSpec(values, calls=resolved.calls)
    bound = surgery.bound(gradients, operands, outcome)
    return PassSpec(
        values,
        bound,
        surgery.scoring(labels),
        due=resolved.due,
        due_gradients=surgery.due_gradients,
        calls=resolved.calls,
    )


def _empty(shape: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
