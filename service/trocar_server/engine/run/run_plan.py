"""Plan run on the owner thread: arguments, recording, resolution, the pass."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.engine.execute.arguments import (
    Argument,
    build_arguments,
    signature_of,
)
from trocar_server.engine.execute.collecting import spare_arguments
from trocar_server.engine.execute.prepared_images import DecodedImages
from trocar_server.engine.host.checked_plan import CheckedPlan, needed_bytes
from trocar_server.engine.host.deployment import Deployment, RecordedSources
from trocar_server.engine.host.gradient_meta_pass import make_pass_spec
from trocar_server.engine.host.pace_checks import refuse_long
from trocar_server.engine.host.recordings import Called
from trocar_server.engine.host.repeatable import watching_draws
from trocar_server.engine.request.plan import Payloads, Plan, Signature
from trocar_server.engine.resolve.pass_memory import check_memory
from trocar_server.engine.resolve.pass_work import pass_work
from trocar_server.engine.resolve.planner import Resolved, resolve_taps
from trocar_server.engine.resolve.surgery_plan import plan_surgery
from trocar_server.engine.run.forward_pass import PassResult, domain_errors, run_pass
from trocar_server.engine.run.operand_tensors import NO_OPERANDS, OperandTensors, check_dtypes
from trocar_server.engine.run.resolving import resolve_plan, resolve_with_meta_pass
from trocar_server.engine.run.source_passes import SourcePass, found_values
from trocar_server.engine.run.start_value import needs_data, needs_more, start_signature
from trocar_server.engine.schedule.device_memory import give_back_cache, keeps_memory
from trocar_server.engine.schedule.lease import Replica, StateWrittenError
from trocar_server.errors import ServiceError, first_line
from trocar_server.models import make_replica
from trocar_server.surgery import (
    CallsDifferError,
    PassGuard,
    Recording,
    StartMixedError,
    StartSession,
    clear_caches,
    is_of_inference_mode,
    laid_out,
    needs_autograd,
)

_NOT_WATCHED = nullcontext()
_NOT_BOUND: "BoundCall | None" = None


@dataclass(frozen=True)
class Prepared:
    """A checked plan and its inputs, with images decoded."""

    checked: CheckedPlan
    payloads: Payloads
    images: Sequence[DecodedImages]
    source_images: Sequence[Sequence[DecodedImages]] = ()
    """The images of each source's arguments."""
    made_bytes: int = 0
    """Bytes reserved for images as decoded and as prepared."""

    @property
    def plan(self) -> Plan:
        """The request."""
        return self.checked.plan


@dataclass(frozen=True)
class BoundCall:
    """A call with its tensors on the device: what every way of running it starts from."""

    checked: CheckedPlan
    arguments: list[Argument]
    called: Called
    """Positional and keyword arguments."""
    operands: OperandTensors
    sources: Sequence[SourcePass]
    guard: PassGuard

    @classmethod
    def of(cls, prepared: Prepared, guard: PassGuard) -> Self:
        """Make the tensors of a call.

        Raises:
            ServiceError: `INPUT_REJECTED` and the like, or the guard stopped it.
        """
        guard.check()
        checked, payloads = prepared.checked, prepared.payloads
        plan, deployment = checked.plan, checked.deployment
        is_start = plan.start_at is not None
        arguments = build_arguments(
            deployment.hosted, plan.inputs, payloads.inputs, prepared.images, guard, is_start=is_start
        )
        operands = OperandTensors.of(deployment, plan, payloads) if checked.has_operands else NO_OPERANDS
        sources: list[SourcePass] = []
        for i, source in enumerate(plan.sources):
            images = prepared.source_images[i]
            sources.append(SourcePass.of(deployment, source, payloads.sources[i], images, guard))
        called: Called = ([], dict(zip(checked.argument_names, arguments, strict=True)))
        if not checked.are_keywords:
            called = deployment.hosted.forward.called(checked.argument_names, arguments)
        return cls(checked, arguments, called, operands, sources, guard)

    @cached_property
    def signature(self) -> Signature:
        """Of the arguments."""
        checked = self.checked
        if checked.signature is not None:
            return checked.signature
        names = checked.argument_names
        return signature_of(names, self.arguments) if names else checked.deployment.example_signature

    @cached_property
    def recording(self) -> Recording:
        """A recorded pass on inputs of the signature.

        Raises:
            ServiceError: The model refuses such inputs, or its data would have to be read.
        """
        checked = self.checked
        if checked.recording is not None:
            return checked.recording
        kinds = checked.deployment.kinds(checked.plan.taps, checked.plan.edits)
        return checked.deployment.record(self.signature, self.guard, kinds)

    def resolve(self) -> Resolved:
        """Return what the plan means by the recording of its signature, within the limits of memory and time.

        Raises:
            ServiceError: See `resolve_plan`; `PASS_TOO_LONG`.
        """
        checked = self.checked
        resolved, start = resolve_plan(
            checked.deployment,
            checked.plan,
            self.signature,
            self.recording,
            checked.limits,
            self.recorded_sources,
        )
        work = pass_work(resolved, self.recording, None if start is None else start.target)
        refuse_long(checked.deployment, self.signature, work, self.guard, checked.limits.max_pass_s)
        return resolved

    def on_own_data(self) -> Self:
        """Return a copy whose sources are recorded on their own data, where it decides about calls."""
        deployment, guard = self.checked.deployment, self.guard
        return replace(self, sources=[source.on_own_data(deployment, guard) for source in self.sources])

    def on_spare_arguments(self) -> Self:
        """Return a copy for a pass that may have to run again; see `spare_arguments`."""
        recording = self.checked.recording or self.checked.deployment.recorded(self.signature)
        given = spare_arguments(self.called, recording)
        return self if given is self.called else replace(self, called=given)

    @cached_property
    def recorded_sources(self) -> RecordedSources:
        """Signatures and recordings of the sources' inputs."""
        return {source.name: source.recorded for source in self.sources}


def run_plan(replica: Replica, prepared: Prepared, guard: PassGuard) -> tuple[Resolved, PassResult]:
    """Run the passes of a plan's sources, then its own, on a leased replica. Owner thread only.

    A pass that runs out of GPU memory is retried once after the allocator has released its cache, which is
    often fragmented. So is one that was the first to be seen to write to the model's tensors. One that fails
    because of inference mode is run again without it, as all later ones of the deployment are; see Note:
    [Inference mode] in `surgery.kept_tensors`.

    Raises:
        ServiceError: Any error of the request, and any reason to stop a pass.
    """
    checked = prepared.checked
    deployment, device = checked.deployment, checked.deployment.hosted.device
    run = _run_resolved if checked.plan.start_at is None else _run_from_start
    # Draws decide whether a reply is cached: those of other deployments never are.
    with watching_draws(device) if deployment.is_repeatable else _NOT_WATCHED as draws:
        found, is_second = None, False
        while found is None:
            remedy, bound = None, _NOT_BOUND
            try:
                with domain_errors(deployment.hosted, checked.memory_bytes):
                    bound = BoundCall.of(prepared, guard)
                    if not checked.is_certain or checked.resolved is None:
                        found = run(replica, bound)
                        continue
                    if checked.recording is None or checked.recording.overwrites_inputs:
                        bound = (
                            bound.on_spare_arguments()
                        )  # on the CPU they are the payload, which a retry reads
                    found = _run(replica, bound, checked.resolved)
            except StateWrittenError:  # it has been undone
                continue
            except ServiceError as error:
                remedy = None if is_second else _remedy(error, deployment)
                if remedy is None:
                    raise
            if remedy is not None:  # not in the handler, which keeps the failed pass alive
                bound = _NOT_BOUND  # its tensors are on the device
                remedy(replica.module)
                is_second = True
    return found if draws is None else (found[0], replace(found[1], has_drawn=draws.has_drawn))


def _remedy(error: ServiceError, deployment: Deployment) -> Callable[[nn.Module], None] | None:
    """Return what makes another try of a failed pass worthwhile, or None."""
    device = deployment.hosted.device
    if needs_autograd(error):
        deployment.in_inference_mode = False
        return clear_caches
    if error.reason is ErrorReason.OUT_OF_MEMORY and keeps_memory(device):
        return lambda _: give_back_cache(device)
    return None


def _run_resolved(replica: Replica, bound: BoundCall) -> tuple[Resolved, PassResult]:
    """Run a plan as resolved; where its calls differ, as resolved on a recording of its own data.

    Raises:
        ServiceError: See `resolve_plan`; `AMBIGUOUS_CALL`, the calls of modules vary for the same data.
    """
    with suppress(CallsDifferError):
        resolved = bound.checked.resolved
        if resolved is None or bound.sources:
            resolved = _resolve_recorded(bound)
        if resolved is not None and resolved.is_counted:
            return _run(replica, bound.on_spare_arguments(), resolved)
    bound = bound.on_own_data()
    resolved = _resolve_own(bound)
    try:
        return _run(replica, bound.on_spare_arguments(), resolved)
    except CallsDifferError as differs:
        raise _ambiguous(differs) from None


def _ambiguous(differs: CallsDifferError) -> ServiceError:
    return ServiceError(
        ErrorReason.AMBIGUOUS_CALL,
        f"'{differs}' is called more often in one pass than in the next on the same data; name the call, "
        f"for example '{differs}@0'",
        name=str(differs),
    )


def _resolve_recorded(bound: BoundCall) -> Resolved | None:
    """Return what a plan means by its signature's recording; None where the data may change that.

    Raises:
        ServiceError: See `BoundCall.resolve`.
    """
    recording = None
    try:
        recording = bound.recording
        return bound.resolve()
    except ServiceError as error:
        if not bound.checked.deployment.may_differ(error, recording):
            raise
        return None


def _run(replica: Replica, bound: BoundCall, resolved: Resolved) -> tuple[Resolved, PassResult]:
    """Run the pass of a resolved plan, and compare what it collected with what was predicted."""
    checked, called = bound.checked, bound.called
    if resolved is checked.resolved and checked.pass_spec is not None:
        result = run_pass(
            replica,
            called,
            resolved.targets,
            checked.pass_spec,
            bound.guard,
            bound.operands.taps,
            in_inference_mode=checked.deployment.in_inference_mode,
        )
    else:
        resolved, result = _run_surgery(replica, bound, resolved)
    predictions = checked.deployment.predictions
    if predictions.symbolic and predictions.has(bound.signature) and _differs(resolved, result):
        checked.deployment.pass_differed(bound.signature)
    return resolved, result


def _run_surgery(replica: Replica, bound: BoundCall, resolved: Resolved) -> tuple[Resolved, PassResult]:
    """Run a pass that edits, scores or traces, or whose meaning depends on its data."""
    checked, guard = bound.checked, bound.guard
    deployment, signature = checked.deployment, bound.signature
    resolved = resolve_with_meta_pass(
        deployment, checked.plan, resolved, signature, checked.limits, bound.recorded_sources, guard
    )
    check_dtypes(resolved, bound.operands)
    found = found_values(replica, resolved, bound.sources, guard)
    pass_spec = make_pass_spec(resolved, bound.operands.edits, bound.operands.objective, found)
    if checked.is_traced:
        pass_spec = replace(pass_spec, graph=deployment.recorder.graph())
    with domain_errors(deployment.hosted, needed_bytes(deployment, resolved, signature)):
        return resolved, run_pass(
            replica,
            bound.called,
            resolved.targets,
            pass_spec,
            guard,
            bound.operands.taps,
            in_inference_mode=deployment.in_inference_mode,
        )


def _differs(resolved: Resolved, result: PassResult) -> bool:
    """Whether a collected value has another shape than predicted."""
    predicted = {output.name: output.shape for entry in resolved.targets for output in entry.outputs}
    return any(predicted.get(found.output.name) != tuple(found.output.shape) for found in result.feature_maps)


def _resolve_own(bound: BoundCall) -> Resolved:
    """Resolve a plan on a recording of its own data."""
    checked, deployment, plan = bound.checked, bound.checked.deployment, bound.checked.plan
    recording = deployment.record_data(bound.called, bound.guard, deployment.kinds(plan.taps, plan.edits))
    recordings = {name: recorded.recording for name, recorded in bound.recorded_sources.items()}
    surgery = plan_surgery(plan.edits, plan.objective, recording, recordings)
    resolved = resolve_taps(plan.taps, recording, checked.limits.max_reply_bytes, surgery)
    check_memory(needed_bytes(deployment, resolved, bound.signature), checked.limits.max_pass_bytes)
    return resolved


def _run_from_start(replica: Replica, bound: BoundCall) -> tuple[Resolved, PassResult]:
    """Run the part of a pass after a given value; where a source's calls differ, as its own data says.

    Raises:
        ServiceError: As `_run_resolved` does.
    """
    with suppress(CallsDifferError):
        return _run_rest(replica, bound)
    try:
        return _run_rest(replica, bound.on_own_data())
    except CallsDifferError as differs:
        raise _ambiguous(differs) from None


def _run_rest(replica: Replica, bound: BoundCall) -> tuple[Resolved, PassResult]:
    """Run the part of a pass after a given value."""
    checked, guard, operands = bound.checked, bound.guard, bound.operands
    deployment, plan, (value,) = checked.deployment, checked.plan, bound.arguments
    at = plan.start_at
    assert at is not None
    signature = start_signature(deployment, plan, at)
    assert isinstance(value, torch.Tensor)
    assert deployment.meta is not None  # models without one, and those that take lists, are refused before
    recording = deployment.record(signature, guard, deployment.kinds(plan.taps, plan.edits))
    resolved, start = resolve_plan(
        deployment, plan, signature, recording, checked.limits, bound.recorded_sources
    )
    assert start is not None
    made = [entry.make("meta") for entry in signature]
    called = deployment.hosted.forward.called([entry.name for entry in signature], made)
    check_dtypes(resolved, operands)
    found = found_values(replica, resolved, bound.sources, guard)
    pass_spec = make_pass_spec(resolved, operands.edits, operands.objective, found)
    # The state of this one, partly without data, is dropped with it.
    pristine = replica.pristine
    module = pristine.tree() if pristine.is_renewed else make_replica(replica.module)
    passing = Replica(pristine, replica.is_live, module)
    session: StartSession | None = None
    try:
        # A copy: the pass may write to it, and may have to run again.
        session = StartSession(passing.module, start.target, laid_out(value.clone(), start.strides))
        pass_spec = replace(pass_spec, start=session)
        return resolved, run_pass(
            passing,
            called,
            resolved.targets,
            pass_spec,
            guard,
            operands.taps,
            in_inference_mode=deployment.in_inference_mode,
        )
    except StartMixedError as mixed:
        raise needs_more(at, str(mixed)) from None
    except ServiceError:
        raise
    except Exception as error:
        if session is not None and session.has_begun:
            raise
        if deployment.in_inference_mode and is_of_inference_mode(str(error)):  # `_remedy` sees to it
            raise
        raise needs_data(at, first_line(error)) from None
