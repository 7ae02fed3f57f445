"""Ready call: a bound call with what it means for its batch, and what an executor gets. Owner thread only."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from trocar_server.engine.execute.collecting import PassSpec
from trocar_server.engine.execute.eager import Eager, Middle
from trocar_server.engine.execute.executor import Executor, ReadyCall
from trocar_server.engine.host.checked_plan import needed_bytes
from trocar_server.engine.host.gradient_meta_pass import make_pass_spec
from trocar_server.engine.request.plan import StartAt
from trocar_server.engine.resolve.pass_memory import check_memory
from trocar_server.engine.resolve.planner import Resolved, resolve_taps
from trocar_server.engine.resolve.surgery_plan import plan_surgery
from trocar_server.engine.run.bound_call import BoundCall
from trocar_server.engine.run.operand_tensors import check_dtypes
from trocar_server.engine.run.resolving import resolve_plan, resolve_with_meta_pass
from trocar_server.engine.run.source_passes import source_values
from trocar_server.engine.run.start_value import start_signature
from trocar_server.errors import ServiceError
from trocar_server.surgery import CallsDifferError, named_arguments


class OwnDataNeededError(CallsDifferError):
    """Only a recording of a call's own data tells what its plan means."""


@dataclass(frozen=True)
class Ready:
    """A call that can be executed.

    Attributes:
        bound: The call with its tensors.
        resolved: What its plan means for its batch.
        executor: Executes it.
        call: What the executor gets.
    """

    bound: BoundCall
    resolved: Resolved
    executor: Executor
    call: ReadyCall

    def named_arguments(self) -> Mapping[str, object]:
        """The arguments of the forward by name."""
        positional, keywords = self.call.arguments
        if not positional:
            return keywords
        return named_arguments(self.bound.checked.deployment.hosted.module, positional, keywords)

    @property
    def memory_bytes(self) -> int:
        """The peak bytes of its pass."""
        return needed_bytes(self.bound.checked.deployment, self.resolved, self.bound.signature)


def make_ready(executor: Executor, bound: BoundCall, *, on_own_data: bool = False) -> Ready:
    """Resolve a call within the limits of memory and time, and run the passes of its sources.

    Args:
        executor: Executes it. Sources and a start in the middle need `Eager`.
        bound: The call.
        on_own_data: Whether it is resolved on a recording of its own data.

    Raises:
        OwnDataNeededError: It has to be.
        CallsDifferError: The data of a source calls modules more or less often than was recorded.
        StateWrittenError: The pass of a source has to run again.
        ServiceError: Any error of the request.
    """
    checked = bound.checked
    resolved, spec = checked.resolved, checked.pass_spec
    if resolved is None or spec is None or not checked.is_certain:
        if on_own_data:
            bound = bound.on_own_data()
        if checked.plan.start_at is not None:
            return _ready_from(executor, bound, checked.plan.start_at)
        bound, resolved, spec = _resolved(executor, bound, is_own=on_own_data)
    elif checked.recording is None or checked.recording.overwrites_inputs:
        bound = bound.on_spare_arguments()
    is_inference = checked.deployment.in_inference_mode and spec.scoring is None
    operands, lent = bound.operands.edits, resolved.only_measured
    call = ReadyCall(bound.called, spec, bound.guard, is_inference, bound.arguments, operands, lent)
    return Ready(bound, resolved, executor, call)


def _resolved(executor: Executor, bound: BoundCall, *, is_own: bool) -> tuple[BoundCall, Resolved, PassSpec]:
    """Resolve a pass from the inputs that edits, scores or traces, or whose meaning depends on its data."""
    checked, signature = bound.checked, bound.signature
    resolved = _resolve_own(bound) if is_own else _resolve(bound)
    bound = bound.on_spare_arguments()
    if resolved is checked.resolved and checked.pass_spec is not None:
        return bound, resolved, checked.pass_spec
    deployment, sources = checked.deployment, bound.recorded_sources
    resolved = resolve_with_meta_pass(
        deployment, checked.plan, resolved, signature, checked.limits, sources, bound.guard
    )
    spec = _pass_spec(executor, bound, resolved)
    if checked.is_traced:
        spec = replace(spec, graph=deployment.recorder.graph())
    return bound, resolved, spec


def _ready_from(executor: Executor, bound: BoundCall, at: StartAt) -> Ready:
    """Make the part of a pass after a given value ready."""
    checked, guard, (value,) = bound.checked, bound.guard, bound.arguments
    deployment, plan = checked.deployment, checked.plan
    assert isinstance(executor, Eager)
    assert isinstance(value, torch.Tensor)
    assert deployment.meta is not None  # models without one, and those that take lists, are refused before
    signature = start_signature(deployment, plan, at)
    recording = deployment.record(signature, guard, deployment.kinds(plan.taps, plan.edits))
    resolved, start = resolve_plan(
        deployment, plan, signature, recording, checked.limits, bound.recorded_sources
    )
    assert start is not None
    spec = _pass_spec(executor, bound, resolved)
    made = [entry.make("meta") for entry in signature]
    called = deployment.hosted.forward.called([entry.name for entry in signature], made)
    is_inference = deployment.in_inference_mode and spec.scoring is None
    middle = Middle(executor.replica, start.target, value, start.strides)
    return Ready(bound, resolved, middle, ReadyCall(called, spec, guard, is_inference))


def _pass_spec(executor: Executor, bound: BoundCall, resolved: Resolved) -> PassSpec:
    operands = bound.operands
    check_dtypes(resolved, operands)
    values = source_values(executor, resolved, bound.sources, bound.guard)
    return make_pass_spec(resolved, operands.edits, operands.objective, values)


def _resolve(bound: BoundCall) -> Resolved:
    """Return what a plan means by a recording of its signature.

    Raises:
        OwnDataNeededError: The data may change that.
        ServiceError: See `BoundCall.resolve`.
    """
    resolved, recording = bound.checked.resolved, None
    if resolved is None or bound.sources:
        try:
            recording = bound.recording
            resolved = bound.resolve()
        except ServiceError as error:
            if not bound.checked.deployment.may_differ(error, recording):
                raise
            resolved = None
    if resolved is None or not resolved.is_counted:
        raise OwnDataNeededError
    return resolved


def _resolve_own(bound: BoundCall) -> Resolved:
    """Return what a plan means by a recording of its own data."""
    checked, deployment, plan = bound.checked, bound.checked.deployment, bound.checked.plan
    recording = deployment.record_data(bound.called, bound.guard, deployment.kinds(plan.taps, plan.edits))
    recordings = {name: recorded.recording for name, recorded in bound.recorded_sources.items()}
    surgery = plan_surgery(plan.edits, plan.objective, recording, recordings)
    resolved = resolve_taps(plan.taps, recording, checked.limits.max_reply_bytes, surgery)
    check_memory(needed_bytes(deployment, resolved, bound.signature), checked.limits.max_pass_bytes)
    return resolved
