"""Variant trial: a compiled pass compared with eager on one batch. Owner thread only."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from trocar_server.engine.compiled.backends.candidates import Runner
from trocar_server.engine.compiled.backends.recipe import Recipe, copied
from trocar_server.engine.execute.collecting import PassSpec
from trocar_server.engine.execute.eager import Eager
from trocar_server.engine.execute.executor import ReadyCall
from trocar_server.engine.request.numerics import Numerics, keeps_promise, worst_deviation
from trocar_server.engine.run.bound_call import BoundCall, Prepared
from trocar_server.engine.run.finite import OverflowWatch, are_finite, are_within, scaled
from trocar_server.engine.schedule.lease import Replica
from trocar_server.engine.transfer import this_thread
from trocar_server.models import HostedModel
from trocar_server.surgery import PassGuard

Values = TypeVar("Values", bound=Mapping[str, torch.Tensor])


Batch = Callable[[], Sequence[torch.Tensor]]
"""Makes the arguments of a pass."""

_EXAMPLE_ROWS = 2

OTHER_SIGNATURE = "the batch has another signature than expected"
"""Of a trial on a batch that tells nothing: images of a size that was not foreseen."""

NOT_WITHIN = "the batch has NaN, infinities or numbers above 1e6"
"""Of a trial on a batch that a compiled pass is not used for."""

NOT_FINITE = "the values are not finite"
"""Of a trial on a batch whose values eager would have to compute in the end."""


def batch_of(prepared: Prepared) -> list[torch.Tensor]:
    """Return the arguments of a call, and the tensors of its edits."""
    bound = BoundCall.of(prepared, PassGuard())
    tensors = [argument for argument in bound.arguments if isinstance(argument, torch.Tensor)]
    return [*tensors, *bound.operands.edits_on(prepared.checked.deployment.hosted.device)]


def example_batch(hosted: HostedModel, recipe: Recipe) -> list[torch.Tensor]:
    """Return seeded arguments, for a trial before there is a call."""
    batch = []
    for spec in recipe.arguments:
        shape = (_EXAMPLE_ROWS, *spec.row_shape)
        known = hosted.signature.value_of(spec.keyword, shape, spec.dtype)
        batch.append((spec.example(_EXAMPLE_ROWS) if known is None else known).to(hosted.device))
    return batch


def problem_of(runner: Runner, recipe: Recipe, batch: Batch, replica: Replica, min_gain: float) -> str:
    """Return the reason why a runner is rejected; empty when it is accepted.

    Its values must be close to the eager ones; its pass must be faster; and larger inputs must not overflow.

    Args:
        runner: The runner on trial.
        recipe: The values that it computes.
        batch: Makes the arguments.
        replica: Leased by the caller.
        min_gain: Required speed-up as a factor; 0 for none.
    """
    arguments = batch()
    inputs = arguments[: len(recipe.arguments)]
    if tuple(tuple(argument.shape[1:]) for argument in inputs) != _row_shapes(recipe):
        return OTHER_SIGNATURE
    is_exact = runner.numerics is Numerics.EXACT
    if not is_exact and not are_within(inputs):
        return NOT_WITHIN
    with torch.inference_mode():
        expected, eager_s = _fastest(lambda given: _eager(replica, recipe, given), arguments, 2)
        if not is_exact and not are_finite(expected.values()):
            return NOT_FINITE
        runner.run(copied(arguments))  # the first pass of a signature compiles its kernels
        result, taken_s = _fastest(runner.run, arguments, 3)
        share = worst_deviation(runner.numerics, expected, result)
        if not keeps_promise(share):
            return f"{share:.3g} of the deviation that '{runner.numerics}' allows"
        if taken_s * min_gain > eager_s:
            return f"it takes {taken_s * 1e3:.3g} ms, eager {eager_s * 1e3:.3g}"
        overflows = not is_exact and _overflows(replica, recipe, inputs)
        return "inputs of 1e6 overflow in a pass" if overflows else ""


def _overflows(replica: Replica, recipe: Recipe, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether the largest inputs that a compiled pass is used for overflow in the eager one."""
    with OverflowWatch() as watch:
        _eager(replica, recipe, scaled(inputs))
    has_overflowed: bool = watch.has_overflowed
    return has_overflowed


def _eager(replica: Replica, recipe: Recipe, arguments: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    inputs, surgery = recipe.bound(arguments)
    call = ReadyCall(recipe.called(inputs), PassSpec(recipe.targets, surgery), PassGuard())
    return Eager(replica).run([call])[0].values


Run = Callable[[Sequence[torch.Tensor]], Values]


def _fastest(run: Run[Values], arguments: Sequence[torch.Tensor], count: int) -> tuple[Values, float]:
    """Return the values of the last run, and the seconds of the shortest: it is the least disturbed."""
    values, best_s = _timed(run, arguments)
    for _ in range(count - 1):
        values, seconds = _timed(run, arguments)
        best_s = min(best_s, seconds)
    return values, best_s


def _timed(run: Run[Values], arguments: Sequence[torch.Tensor]) -> tuple[Values, float]:
    given = copied(arguments)  # a model may write into its own input
    this_thread.transfers.synchronize()  # a GPU runs asynchronously
    started = time.perf_counter()
    values = run(given)
    this_thread.transfers.synchronize()
    return values, time.perf_counter() - started


def _row_shapes(recipe: Recipe) -> tuple[tuple[int, ...], ...]:
    return tuple(spec.row_shape for spec in recipe.arguments)
