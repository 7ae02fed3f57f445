"""Plan run on the owner thread: arguments, recording, resolution, the pass."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.config import Limits
from trocar_server.engine.execute.arguments import (
    Argument,
    build_arguments,
    predicted_signature,
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
from trocar_server.engine.resolve.planner import Resolved, check_byte_count, resolve_taps
from trocar_server.engine.resolve.surgery_plan import plan_surgery
from trocar_server.engine.run.forward_pass import PassResult, domain_errors, run_pass
from trocar_server.engine.run.operand_tensors import NO_OPERANDS, OperandTensors, check_dtypes
from trocar_server.engine.run.source_passes import SourcePass, found_values
from trocar_server.engine.run.start_value import (
    Start,
    check_after_start,
    find_start,
    needs_data,
    needs_more,
    start_signature,
)
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

NO_SOURCES: RecordedSources = {}
_NOT_WATCHED = nullcontext()


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


def known_signature(deployment: Deployment, plan: Plan) -> Signature | None:
    """Return the input signature of a full pass, where it is known before any image is decoded.

    Raises:
        ServiceError: The inputs do not fit the model, or no pass can start where the plan says.
    """
    if plan.start_at is not None:
        return start_signature(deployment, plan, plan.start_at)
    if not plan.inputs:  # only parameters are wanted
        return deployment.example_signature
    return predicted_signature(deployment.hosted, plan.inputs)


def resolve_plan(
    deployment: Deployment,
    plan: Plan,
    signature: Signature,
    recording: Recording,
    limits: Limits,
    sources: RecordedSources = NO_SOURCES,
) -> tuple[Resolved, Start | None]:
    """Check a plan against a recorded pass on inputs of its signature.

    Raises:
        ServiceError: Any error of its taps, edits, objective, start or the size of its reply.
    """
    resolved = deployment.resolve(plan, signature, recording, limits.max_reply_bytes, sources)
    check_memory(needed_bytes(deployment, resolved, signature), limits.max_pass_bytes)
    if plan.start_at is None:
        return resolved, None
    start = find_start(plan, plan.start_at, signature, recording)
    check_after_start(resolved, start, plan.start_at, recording)
    return resolved, start


def resolve_with_meta_pass(
    deployment: Deployment,
    plan: Plan,
    resolved: Resolved,
    signature: Signature,
    limits: Limits,
    sources: RecordedSources,
    guard: PassGuard,
) -> Resolved:
    """Check memory and available gradients by a gradient meta pass. Owner thread only.

    Raises:
        ServiceError: `PASS_TOO_LARGE`, or an error of the objective.
    """
    resolved = deployment.run_meta_pass(plan, resolved, signature, sources, guard)
    check_memory(needed_bytes(deployment, resolved, signature), limits.max_pass_bytes)
    return resolved


def run_plan(replica: Replica, prepared: Prepared, guard: PassGuard) -> tuple[Resolved, PassResult]:
    """Run the passes of a plan's sources, then its own, on a leased replica. Owner thread only.

    A pass that runs out of GPU memory is retried once after the allocator has released its cache, which is
    often fragmented. So is one that was the first to be seen to write to the model's tensors. One that fails
    because of inference mode is run again without it, as all later ones of the deployment are; see Note:
    [Inference mode] in `surgery.kept_tensors`.

    Raises:
        ServiceError: Any error of the request, and any reason to stop a pass.
    """
    deployment = prepared.checked.deployment
    device = deployment.hosted.device
    # Draws decide whether a reply is cached: those of other deployments never are.
    with watching_draws(device) if deployment.is_repeatable else _NOT_WATCHED as draws:
        found, is_second = None, False
        while found is None:
            remedy = None
            try:
                found = _run_plan(replica, prepared, guard)
            except StateWrittenError:  # it has been undone
                continue
            except ServiceError as error:
                remedy = None if is_second else _remedy(error, deployment)
                if remedy is None:
                    raise
            if remedy is not None:  # not in the handler, which keeps the failed pass alive
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


def _run_plan(replica: Replica, prepared: Prepared, guard: PassGuard) -> tuple[Resolved, PassResult]:
    checked = prepared.checked
    plan, deployment, payloads = checked.plan, checked.deployment, prepared.payloads
    with domain_errors(deployment.hosted, checked.memory_bytes):
        guard.check()
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
        ready = _ReadyPass(checked, replica, arguments, called, operands, sources, guard)
        if checked.is_certain and checked.resolved is not None:
            if checked.recording is None or checked.recording.overwrites_inputs:
                ready = ready.on_spare_arguments()  # on the CPU they are the payload, which a retry reads
            resolved, result = _run(ready, checked.resolved)
        else:
            resolved, result = _run_from_start(ready) if is_start else _run_resolved(ready)
    if result.byte_count > checked.limits.max_reply_bytes:  # the size may depend on the data
        check_byte_count(result.byte_count, checked.limits.max_reply_bytes)
    return resolved, result


@dataclass(frozen=True)
class _ReadyPass:
    """Everything that one pass needs, on the device."""

    checked: CheckedPlan
    replica: Replica
    arguments: list[Argument]
    called: Called
    """Positional and keyword arguments."""
    operands: OperandTensors
    sources: Sequence[SourcePass]
    guard: PassGuard

    @cached_property
    def signature(self) -> Signature:
        """Of the arguments."""
        checked = self.checked
        if checked.signature is not None:
            return checked.signature
        names = checked.argument_names
        return signature_of(names, self.arguments) if names else checked.deployment.example_signature

    def on_own_data(self) -> "_ReadyPass":
        """Return a copy whose sources are recorded on their own data, where it decides about calls."""
        deployment, guard = self.checked.deployment, self.guard
        return replace(self, sources=[source.on_own_data(deployment, guard) for source in self.sources])

    def on_spare_arguments(self) -> "_ReadyPass":
        """Return a copy for a pass that may have to run again; see `spare_arguments`."""
        recording = self.checked.recording or self.checked.deployment.recorded(self.signature)
        given = spare_arguments(self.called, recording)
        return self if given is self.called else replace(self, called=given)

    @cached_property
    def recorded_sources(self) -> RecordedSources:
        """Signatures and recordings of the sources' inputs."""
        return {source.name: source.recorded for source in self.sources}


def _run_resolved(ready: _ReadyPass) -> tuple[Resolved, PassResult]:
    """Run a plan as resolved; where its calls differ, as resolved on a recording of its own data.

    Raises:
        ServiceError: See `resolve_plan`; `AMBIGUOUS_CALL`, the calls of modules vary for the same data.
    """
    with suppress(CallsDifferError):
        resolved = ready.checked.resolved
        if resolved is None or ready.sources:
            resolved = _resolve_recorded(ready)
        if resolved is not None and resolved.is_counted:
            return _run(ready.on_spare_arguments(), resolved)
    ready = ready.on_own_data()
    resolved = _resolve_own(ready)
    try:
        return _run(ready.on_spare_arguments(), resolved)
    except CallsDifferError as differs:
        raise _ambiguous(differs) from None


def _ambiguous(differs: CallsDifferError) -> ServiceError:
    return ServiceError(
        ErrorReason.AMBIGUOUS_CALL,
        f"'{differs}' is called more often in one pass than in the next on the same data; name the call, "
        f"for example '{differs}@0'",
        name=str(differs),
    )


def _resolve_recorded(ready: _ReadyPass) -> Resolved | None:
    """Return what a plan means by its signature's recording; None where the data may change that.

    Raises:
        ServiceError: See `resolve_plan`.
    """
    checked = ready.checked
    deployment, plan, recording = checked.deployment, checked.plan, None
    try:
        recording = deployment.record(ready.signature, ready.guard, deployment.kinds(plan.taps, plan.edits))
        resolved, start = resolve_plan(
            deployment, plan, ready.signature, recording, checked.limits, ready.recorded_sources
        )
        work = pass_work(resolved, recording, None if start is None else start.target)
        refuse_long(deployment, ready.signature, work, ready.guard, checked.limits.max_pass_s)
        return resolved
    except ServiceError as error:
        if not deployment.may_differ(error, recording):
            raise
        return None


def _run(ready: _ReadyPass, resolved: Resolved) -> tuple[Resolved, PassResult]:
    """Run the pass of a resolved plan, and compare what it collected with what was predicted."""
    checked, called = ready.checked, ready.called
    if resolved is checked.resolved and checked.pass_spec is not None:
        result = run_pass(
            ready.replica,
            called,
            resolved.targets,
            checked.pass_spec,
            ready.guard,
            ready.operands.taps,
            in_inference_mode=checked.deployment.in_inference_mode,
        )
    else:
        resolved, result = _run_surgery(ready, resolved)
    predictions = checked.deployment.predictions
    if predictions.symbolic and predictions.has(ready.signature) and _differs(resolved, result):
        checked.deployment.pass_differed(ready.signature)
    return resolved, result


def _run_surgery(ready: _ReadyPass, resolved: Resolved) -> tuple[Resolved, PassResult]:
    """Run a pass that edits, scores or traces, or whose meaning depends on its data."""
    checked, replica, guard = ready.checked, ready.replica, ready.guard
    deployment, signature = checked.deployment, ready.signature
    resolved = resolve_with_meta_pass(
        deployment, checked.plan, resolved, signature, checked.limits, ready.recorded_sources, guard
    )
    check_dtypes(resolved, ready.operands)
    found = found_values(replica, resolved, ready.sources, guard)
    pass_spec = make_pass_spec(resolved, ready.operands.edits, ready.operands.objective, found)
    if checked.is_traced:
        pass_spec = replace(pass_spec, graph=deployment.recorder.graph())
    with domain_errors(deployment.hosted, needed_bytes(deployment, resolved, signature)):
        return resolved, run_pass(
            replica,
            ready.called,
            resolved.targets,
            pass_spec,
            guard,
            ready.operands.taps,
            in_inference_mode=deployment.in_inference_mode,
        )


def _differs(resolved: Resolved, result: PassResult) -> bool:
    """Whether a collected value has another shape than predicted."""
    predicted = {output.name: output.shape for entry in resolved.targets for output in entry.outputs}
    return any(predicted.get(found.output.name) != tuple(found.output.shape) for found in result.feature_maps)


def _resolve_own(ready: _ReadyPass) -> Resolved:
    """Resolve a plan on a recording of its own data."""
    checked, deployment, plan = ready.checked, ready.checked.deployment, ready.checked.plan
    recording = deployment.record_data(ready.called, ready.guard, deployment.kinds(plan.taps, plan.edits))
    recordings = {name: recorded.recording for name, recorded in ready.recorded_sources.items()}
    surgery = plan_surgery(plan.edits, plan.objective, recording, recordings)
    resolved = resolve_taps(plan.taps, recording, checked.limits.max_reply_bytes, surgery)
    check_memory(needed_bytes(deployment, resolved, ready.signature), checked.limits.max_pass_bytes)
    return resolved


def _run_from_start(ready: _ReadyPass) -> tuple[Resolved, PassResult]:
    """Run the part of a pass after a given value; where a source's calls differ, as its own data says.

    Raises:
        ServiceError: As `_run_resolved` does.
    """
    with suppress(CallsDifferError):
        return _run_rest(ready)
    try:
        return _run_rest(ready.on_own_data())
    except CallsDifferError as differs:
        raise _ambiguous(differs) from None


def _run_rest(ready: _ReadyPass) -> tuple[Resolved, PassResult]:
    """Run the part of a pass after a given value."""
    checked, guard, operands = ready.checked, ready.guard, ready.operands
    deployment, plan, (value,) = checked.deployment, checked.plan, ready.arguments
    at = plan.start_at
    assert at is not None
    signature = start_signature(deployment, plan, at)
    assert isinstance(value, torch.Tensor)
    assert deployment.meta is not None  # models without one, and those that take lists, are refused before
    recording = deployment.record(signature, guard, deployment.kinds(plan.taps, plan.edits))
    resolved, start = resolve_plan(
        deployment, plan, signature, recording, checked.limits, ready.recorded_sources
    )
    assert start is not None
    made = [entry.make("meta") for entry in signature]
    called = deployment.hosted.forward.called([entry.name for entry in signature], made)
    check_dtypes(resolved, operands)
    found = found_values(ready.replica, resolved, ready.sources, guard)
    pass_spec = make_pass_spec(resolved, operands.edits, operands.objective, found)
    # The state of this one, partly without data, is dropped with it.
    pristine = ready.replica.pristine
    module = pristine.tree() if pristine.is_renewed else make_replica(ready.replica.module)
    passing = Replica(pristine, ready.replica.is_live, module)
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
