"""Requested recipe: what a call asks of a compiled variant, and whether that is what a variant computes."""

from dataclasses import replace

import torch

from trocar_server.engine.compiled.backends.recipe import ArgumentSpec, Recipe
from trocar_server.engine.request.plan import Plan
from trocar_server.engine.resolve.planner import Resolved
from trocar_server.engine.run.ready import Ready


def recipe_of(plan: Plan, resolved: Resolved, arguments: tuple[ArgumentSpec, ...]) -> Recipe:
    """Return what a compiled variant has to compute for a plan, as resolved for one batch size."""
    targets = {entry.target.name: entry.target for entry in resolved.targets}
    surgery = resolved.surgery.bound((), (), {})
    counts = tuple(len(request.edit.operands) for request in plan.edits)
    return Recipe(
        arguments, tuple(targets.values()), surgery.before, surgery.after, counts, plan.negative_zeros
    )


# Note: [One recipe, many batch sizes]
# A model may call its modules more often for a larger batch, so that `block@-1` is another call there, and it
# may take images of other sizes than the example. A variant is found by the request alone, without the size
# of the batch: so each call is resolved for its own, and runs only where that asks for the compiled values.
def why_not(recipe: Recipe, ready: Ready) -> str:
    """Return why a call does not mean the compiled values; empty where it does."""
    bound = ready.bound
    tensors = [argument for argument in bound.arguments if isinstance(argument, torch.Tensor)]
    if len(tensors) != len(bound.arguments):
        return "the model takes lists of tensors"
    if not bound.recording.is_symbolic:
        return "the control flow of the model depends on its data"
    shapes = tuple(
        replace(spec, dtype=tensor.dtype, row_shape=tuple(tensor.shape[1:]))
        for spec, tensor in zip(recipe.arguments, tensors, strict=True)
    )
    if recipe_of(bound.checked.plan, ready.resolved, shapes) != recipe:
        return "its batch has other values than the compiled ones"
    return ""
