"""Compiled pass: a group of calls run on a compiled variant. Owner thread only."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from trocar_server.engine.compiled.backends.candidates import Runner
from trocar_server.engine.compiled.backends.recipe import ArgumentSpec, Recipe, copied
from trocar_server.engine.compiled.finite import are_finite, are_within
from trocar_server.engine.execute.collecting import Collected
from trocar_server.engine.host.checked_plan import needed_bytes
from trocar_server.engine.host.deployment import Deployment
from trocar_server.engine.request.numerics import Numerics
from trocar_server.engine.request.plan import Plan
from trocar_server.engine.resolve.planner import Resolved
from trocar_server.engine.run.extraction import ExecutionReport, Extraction, finished
from trocar_server.engine.run.forward_pass import (
    PassResult,
    domain_errors,
    finish_pass,
)
from trocar_server.engine.run.operand_tensors import check_dtypes
from trocar_server.engine.run.preview import stop_path
from trocar_server.engine.run.run_plan import BoundCall, Prepared
from trocar_server.engine.run.stream_statistics import StreamStatistics
from trocar_server.engine.schedule.device_memory import is_out_of_memory
from trocar_server.errors import ServiceError
from trocar_server.surgery import PassGuard


@dataclass(frozen=True, eq=False)
class CompiledCall:
    """One call in a group.

    Attributes:
        prepared: The checked plan and its inputs.
        guard: Stops the pass on cancellation or deadline.
        statistics: Accumulates the statistics of a stream.
        asked_at: Arrival time, as `time.perf_counter()` in seconds.
        flow: The flow that is charged.
    """

    prepared: Prepared
    guard: PassGuard
    statistics: StreamStatistics | None
    asked_at: float
    flow: str


class NotCompiledError(Exception):
    """A call cannot run on the compiled pass; it runs eagerly instead."""


class PassFailedError(NotCompiledError):
    """The backend failed on a call, perhaps because of its inputs: eager decides."""


@dataclass(frozen=True)
class _Ready:
    call: CompiledCall
    bound: BoundCall
    arguments: list[torch.Tensor]
    resolved: Resolved

    @property
    def given(self) -> list[torch.Tensor]:
        """The tensors of a run: the arguments, then those of the edits."""
        return [*self.arguments, *self.bound.operands.edits_on(self.arguments[0].device)]

    @property
    def rows(self) -> int:
        return self.arguments[0].shape[0]

    @property
    def memory_bytes(self) -> int:
        """The peak bytes of its pass."""
        return needed_bytes(self.bound.checked.deployment, self.resolved, self.bound.signature)


def recipe_of(plan: Plan, resolved: Resolved, arguments: tuple[ArgumentSpec, ...]) -> Recipe:
    """Return what a compiled variant has to compute for a plan, as resolved for one batch size."""
    targets = {entry.target.name: entry.target for entry in resolved.targets}
    surgery = resolved.surgery.bound((), (), {})
    counts = tuple(len(request.edit.operands) for request in plan.edits)
    return Recipe(
        arguments, tuple(targets.values()), surgery.before, surgery.after, counts, plan.negative_zeros
    )


def run_group(
    deployment: Deployment, recipe: Recipe, runner: Runner, calls: Sequence[CompiledCall], max_pass_bytes: int
) -> list[Extraction | BaseException]:
    """Run calls together; each gets its own extraction, or its own error."""
    started = time.perf_counter()
    found: list[_Ready | BaseException] = [_caught(deployment, recipe, runner, call) for call in calls]
    ready = [entry for entry in found if isinstance(entry, _Ready)]
    try:
        values = _values(runner, ready, max_pass_bytes)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return [NotCompiledError("too little memory") if isinstance(e, _Ready) else e for e in found]
    outcomes: list[Extraction | BaseException] = []
    parts = iter(values)
    for entry in found:
        outcome = (
            entry
            if isinstance(entry, BaseException)
            else _finished(
                deployment, runner, entry, next(parts), sum(other.rows for other in ready), started
            )
        )
        outcomes.append(outcome)
    return outcomes


def _caught(
    deployment: Deployment, recipe: Recipe, runner: Runner, call: CompiledCall
) -> _Ready | BaseException:
    try:
        with domain_errors(deployment.hosted):
            ready = _ready(recipe, call)
    except ServiceError as error:
        return error
    if isinstance(ready, _Ready) and _is_inexact(runner) and not are_within(ready.arguments):
        return NotCompiledError("its inputs have NaN, infinities or huge numbers")
    return ready


def _is_inexact(runner: Runner) -> bool:
    """Whether its kernels are not those of eager, see Note: [Values that are not finite]."""
    return runner.numerics is not Numerics.EXACT


# Note: [One recipe, many batch sizes]
# A model may call its modules more often for a larger batch, so that `block@-1` is another call there, and it
# may take images of other sizes than the example. A variant is found by the request alone, without the size
# of the batch: so each call is resolved for its own, and runs only where that asks for the compiled values.
def _ready(recipe: Recipe, call: CompiledCall) -> _Ready | BaseException:
    """Make a call's tensors; `NotCompiledError` where it does not mean the compiled values."""
    bound = BoundCall.of(call.prepared, call.guard)
    tensors = [argument for argument in bound.arguments if isinstance(argument, torch.Tensor)]
    if len(tensors) != len(bound.arguments):
        return NotCompiledError("the model takes lists of tensors")
    resolved = bound.checked.resolved or bound.resolve()  # images tell their size when they are decoded
    if not bound.recording.is_symbolic:
        return NotCompiledError("the control flow of the model depends on its data")
    shapes = tuple(
        replace(spec, dtype=tensor.dtype, row_shape=tuple(tensor.shape[1:]))
        for spec, tensor in zip(recipe.arguments, tensors, strict=True)
    )
    if recipe_of(bound.checked.plan, resolved, shapes) != recipe:
        return NotCompiledError("its batch has other values than the compiled ones")
    if bound.recording.overwrites_inputs:  # an eager pass may have to follow
        tensors = copied(tensors)
    check_dtypes(resolved, bound.operands)
    return _Ready(call, bound, tensors, resolved)


def _values(runner: Runner, ready: Sequence[_Ready], max_bytes: int) -> list[Mapping[str, torch.Tensor]]:
    """Run the pass, for all calls together where their memory is within the limit; see `merge_group`."""
    if not ready:
        return []
    with torch.inference_mode():
        if len(ready) == 1:
            return [runner.run(ready[0].given, ready[0].resolved.only_measured)]
        if sum(entry.memory_bytes for entry in ready) > max_bytes:
            return [runner.run(entry.given) for entry in ready]
        rows = [entry.rows for entry in ready]
        joined = [torch.cat(columns) for columns in zip(*(entry.arguments for entry in ready), strict=True)]
        together = runner.run(joined)
        parts = {name: value.split(rows) for name, value in together.items()}
        return [{name: found[i] for name, found in parts.items()} for i in range(len(rows))]


def _finished(
    deployment: Deployment,
    runner: Runner,
    entry: _Ready,
    values: Mapping[str, torch.Tensor],
    row_count: int,
    started: float,
) -> Extraction | BaseException:
    if _is_inexact(runner) and not are_finite(values.values()):
        return NotCompiledError("its values are not finite")
    report = ExecutionReport(runner.numerics, runner.engine, row_count)
    queue_s, checked = started - entry.call.asked_at, entry.bound.checked
    try:
        with domain_errors(deployment.hosted), torch.inference_mode():
            result = _reduced(entry, values, started)
            return finished(checked, entry.resolved, result, report, queue_s, entry.call.statistics)
    except ServiceError as error:
        return error


def _reduced(entry: _Ready, values: Mapping[str, torch.Tensor], started: float) -> PassResult:
    bound, targets = entry.bound, entry.resolved.targets
    # Where the eager pass would have stopped: later modules are not computed here either.
    collected = Collected(dict(values), stop_path([target.target for target in targets], bound.recording))
    given = dict(zip(bound.checked.argument_names, entry.arguments, strict=True))
    return finish_pass(collected, targets, bound.guard, bound.operands.taps, started, given)
