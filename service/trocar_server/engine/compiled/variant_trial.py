"""Variant trial: a compiled pass compared with eager on one batch. Owner thread only."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from trocar_server.engine.compiled.backends.candidates import Runner
from trocar_server.engine.compiled.backends.not_finite import NotFiniteError
from trocar_server.engine.compiled.backends.recipe import Recipe, copied
from trocar_server.engine.compiled.finite import OverflowWatch, are_finite, are_within, scaled
from trocar_server.engine.execute.arguments import build_arguments
from trocar_server.engine.execute.collecting import PassSpec, collect
from trocar_server.engine.request.numerics import Numerics, keeps_promise, worst_deviation
from trocar_server.engine.run.operand_tensors import OperandTensors
from trocar_server.engine.run.run_plan import Prepared
from trocar_server.engine.schedule.lease import Replica
from trocar_server.engine.transfer import this_thread
from trocar_server.models import HostedModel
from trocar_server.surgery import PassGuard

Values = TypeVar("Values", bound=Mapping[str, torch.Tensor])


Batch = Callable[[], Sequence[torch.Tensor]]
"""Makes the arguments of a pass."""

_EXAMPLE_ROWS = 2
_SIZE_TOLERANCE = 0.1

OTHER_SIGNATURE = "the batch has another signature than expected"
"""Of a trial on a batch that tells nothing: images of a size that was not foreseen."""

NOT_WITHIN = "the batch has NaN, infinities or numbers above 1e6"
"""Of a trial on a batch that a compiled pass is not used for."""

NOT_FINITE = "the values are not finite"
"""Of a trial on a batch whose values eager would have to compute in the end."""


def batch_of(hosted: HostedModel, prepared: Prepared) -> list[torch.Tensor]:
    """Return the arguments of a call, and the tensors of its edits."""
    plan, payloads = prepared.plan, prepared.payloads
    given = build_arguments(hosted, plan.inputs, payloads.inputs, prepared.images)
    tensors = [argument for argument in given if isinstance(argument, torch.Tensor)]
    operands = OperandTensors.of(prepared.checked.deployment, plan, payloads)
    return [*tensors, *operands.edits_on(hosted.device)]


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

    Its values must be close to the eager ones, for the batch alone and with other rows appended, which must
    not change them; its pass must be faster; and larger inputs must not overflow.

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
        found, taken_s = _fastest(runner.run, arguments, 3)
        share = worst_deviation(runner.numerics, expected, found)
        if not keeps_promise(share):
            return f"{share:.3g} of the deviation that '{runner.numerics}' allows"
        if taken_s * min_gain > eager_s:
            return f"it takes {taken_s * 1e3:.3g} ms, eager {eager_s * 1e3:.3g}"
        if is_exact:  # never merged: another batch size has other bits
            return ""
        if _overflows(replica, recipe, inputs):
            return "inputs of 1e6 overflow in a pass"
        return _problem_with_company(runner, recipe, arguments, found)


def _problem_with_company(
    runner: Runner, recipe: Recipe, arguments: Sequence[torch.Tensor], alone: Mapping[str, torch.Tensor]
) -> str:
    """Run the batch with other rows appended: where values have rows, the first ones must not change."""
    rows = arguments[0].shape[0]
    try:
        found = runner.run([torch.cat([argument, _company(argument)]) for argument in arguments])
    except NotFiniteError:  # moved numbers have no logarithm, for example; those that occur have
        found = runner.run([torch.cat([argument, _as_one(argument)]) for argument in arguments])
    pairs = [(alone[name], value) for name, value in found.items()]
    if any((own.shape[:1], both.shape[:1]) != ((rows,), (2 * rows,)) for own, both in pairs):
        return ""  # such values are never merged
    share = worst_deviation(runner.numerics, alone, {name: value[:rows] for name, value in found.items()})
    is_as_large = all(_is_as_large(own, both[:rows]) for own, both in pairs if own.is_floating_point())
    return "" if is_as_large and keeps_promise(share) else "the samples of a batch influence each other"


def _company(argument: torch.Tensor) -> torch.Tensor:
    """Return as many rows with other statistics: a model may normalise by those of the whole batch.

    Each number of a float argument moves by at least 1, two of three up and the third down, so that mean,
    spread and extremes are others. Integers may be indices, where only values that occur are surely valid:
    each row has its own largest one throughout, which masks nothing where it is a mask.
    """
    is_index = not argument.is_floating_point()
    if argument.is_cuda:  # a model may convert it to an index, and a wrong one ends all use of the device
        is_index = is_index or not argument.frac().any()
    if is_index:
        return _as_one(argument)
    moved = argument.flip(0).roll(1, -1)
    signs = torch.ones(moved.shape, dtype=moved.dtype, device=moved.device)
    signs.view(-1)[2::3] = -1
    return moved + signs * (2 * moved.abs() + 1)


def _as_one(argument: torch.Tensor) -> torch.Tensor:
    """Return an argument with one of its own numbers throughout each row: the first one of floats."""
    if argument.is_floating_point() or not argument.numel():
        return argument[..., :1].expand_as(argument)
    return argument.amax(-1, keepdim=True).expand_as(argument)


def _is_as_large(own: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the sizes of two values are about equal: a cosine, the promise of `bf16`, sees no factor."""
    size = float(own.double().norm())
    return not abs(float(other.double().norm()) - size) > _SIZE_TOLERANCE * size


def _overflows(replica: Replica, recipe: Recipe, inputs: Sequence[torch.Tensor]) -> bool:
    """Whether the largest inputs that a compiled pass is used for overflow in the eager one."""
    with OverflowWatch() as watch:
        _eager(replica, recipe, scaled(inputs))
    has_overflowed: bool = watch.has_overflowed
    return has_overflowed


def _eager(replica: Replica, recipe: Recipe, arguments: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    inputs, surgery = recipe.bound(arguments)
    with replica.passing() as module:
        return collect(module, recipe.called(inputs), PassSpec(recipe.targets, surgery), PassGuard()).values


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
