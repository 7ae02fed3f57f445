"""A pass with gradients without data: what it holds in memory, and which gradients come.

On the meta device autograd builds the same graph and keeps the same tensors for the backward pass, so the
bytes that are alive are those of the real pass; see `surgery.liveness`.
"""

from collections.abc import Sequence

import torch
from torch import nn

from trocar_server.engine.collecting import Work, collect
from trocar_server.engine.plan import Plan, Signature, split_arguments
from trocar_server.engine.planner import Rehearsal, Resolved
from trocar_server.errors import ServiceError
from trocar_server.surgery import PassGuard
from trocar_server.surgery.liveness import LiveBytes, fused_attention
from trocar_server.surgery.writes import WriteWatch


def rehearse(
    meta: nn.Module, plan: Plan, resolved: Resolved, signature: Signature, guard: PassGuard
) -> Rehearsal | None:
    """Run a plan's forward and backward pass on a model without data.

    Returns:
        How it went, or None where an operator has no form without data: the real pass will show.

    Raises:
        ServiceError: What is wrong with edits or objective.
        PassAborted: The guard says to stop.
    """
    arguments = split_arguments(
        [entry.name for entry in signature], [entry.make("meta") for entry in signature]
    )
    constants = [[_empty(s.shape, s.dtype) for s in request.edit.constants] for request in plan.edits]
    labels = [_empty(spec.shape, spec.dtype) for spec in plan.objective_constants]
    swaps = [entry for entry in resolved.surgery.edits if entry.swap]
    found = {e.swap.key: _empty(e.leaf.shape or (), e.leaf.dtype) for e in swaps if e.swap and e.swap.source}
    work = make_work(resolved, constants, labels, found)
    watch, live = WriteWatch(), LiveBytes()
    watch.live = live
    attention = {torch.ops.aten._softmax.default}  # whether there is one is not known
    try:
        with torch.no_grad(), watch, fused_attention(live, attention):
            collected = collect(meta, arguments, work, guard)
    except ServiceError:
        raise
    except Exception:  # noqa: BLE001 - whatever torch or the model raises without data
        return None
    wanted = {entry.target.name for entry in resolved.targets if entry.target.is_gradient}
    return Rehearsal(live.peak, frozenset(wanted - collected.values.keys()))


def make_work(
    resolved: Resolved,
    constants: Sequence[Sequence[torch.Tensor]],
    labels: Sequence[torch.Tensor],
    found: dict[str, torch.Tensor],
) -> Work:
    """Return what a pass does for a resolved plan.

    Args:
        resolved: The plan.
        constants: The tensors of each edit request, by its position.
        labels: The tensors of the objective.
        found: Values for swaps from other passes, by key.
    """
    surgery = resolved.surgery
    gradients = [entry.target for entry in resolved.targets if entry.target.is_gradient]
    values = [surgery.actual(entry.target) for entry in resolved.targets if not entry.target.is_gradient]
    if surgery.is_nothing:
        return Work(values)
    bound = surgery.bound(gradients, constants, found)
    return Work(values, bound, surgery.scoring(labels), due=resolved.due, due_gradients=surgery.due_gradients)


def _empty(shape: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
