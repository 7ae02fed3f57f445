"""What one extraction does on the owner thread: arguments, recording, resolving, the pass."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from PIL import Image

from trocar_api.reasons import ErrorReason
from trocar_server.config import Limits
from trocar_server.engine.constants import Constants, check_constants
from trocar_server.engine.device_memory import give_back_cache, keeps_memory
from trocar_server.engine.hosting import Host, SourceForms
from trocar_server.engine.inputs import (
    Argument,
    build_arguments,
    predicted_signature,
    signature_of,
)
from trocar_server.engine.lease import Replica
from trocar_server.engine.memory import check_memory
from trocar_server.engine.passes import PassResult, domain_errors, run_pass
from trocar_server.engine.plan import Payloads, Plan, Signature, split_arguments
from trocar_server.engine.planner import Resolved, check_byte_count, resolve_taps
from trocar_server.engine.rehearsal import make_work
from trocar_server.engine.repeatable import watching_draws
from trocar_server.engine.sources import SourcePass, found_values
from trocar_server.engine.starting import (
    Start,
    check_after_start,
    find_start,
    needs_data,
    needs_more,
    start_signature,
)
from trocar_server.engine.surgery_plan import plan_surgery
from trocar_server.errors import ServiceError, first_line
from trocar_server.models import make_replica
from trocar_server.surgery import PassGuard, Recording, StartMixedError, StartSession, laid_out

NO_SOURCES: SourceForms = {}


@dataclass(frozen=True)
class Prepared:
    """A checked plan and its inputs, images decoded: what one pass needs."""

    plan: Plan
    payloads: Payloads
    images: Sequence[list[Image.Image]]
    source_images: Sequence[Sequence[list[Image.Image]]] = ()
    """The images of each source's arguments."""


def known_signature(host: Host, plan: Plan) -> Signature | None:
    """Return the form of the inputs of a full pass, where it is known before any image is decoded.

    Raises:
        ServiceError: The inputs do not fit the model, or no pass can start where the plan says.
    """
    if plan.start_at is not None:
        return start_signature(host, plan, plan.start_at)
    if not plan.inputs:  # parameters alone are wanted
        return host.example_signature
    return predicted_signature(host.hosted, plan.inputs)


def resolve_plan(
    host: Host,
    plan: Plan,
    signature: Signature,
    recording: Recording,
    limits: Limits,
    sources: SourceForms = NO_SOURCES,
) -> tuple[Resolved, Start | None]:
    """Check a plan against a recorded pass on inputs of its form.

    Raises:
        ServiceError: Anything that is wrong with its taps, edits, objective, start or the size of its reply.
    """
    resolved = host.resolve(plan, signature, recording, limits.max_reply_bytes, sources)
    check_memory(resolved.memory_bytes(signature), limits.max_pass_bytes)
    if plan.start_at is None:
        return resolved, None
    start = find_start(plan, plan.start_at, signature, recording)
    check_after_start(resolved, start, plan.start_at, recording)
    return resolved, start


def rehearse_plan(
    host: Host,
    plan: Plan,
    resolved: Resolved,
    signature: Signature,
    limits: Limits,
    sources: SourceForms,
    guard: PassGuard,
) -> Resolved:
    """Check what only a pass with gradients shows: its memory, and which gradients come. Owner thread only.

    Raises:
        ServiceError: `PASS_TOO_LARGE`, or what is wrong with the objective.
    """
    resolved = host.rehearse(plan, resolved, signature, sources, guard)
    check_memory(resolved.memory_bytes(signature), limits.max_pass_bytes)
    return resolved


def run_plan(
    host: Host, replica: Replica, prepared: Prepared, guard: PassGuard, limits: Limits
) -> tuple[Resolved, PassResult]:
    """Run one pass on a leased replica, and before it those of its sources. Owner thread only.

    A pass for which a GPU has no memory is run once more when the allocator has given back what it keeps:
    that is often in pieces of which none was large enough.

    Raises:
        ServiceError: Whatever is wrong with the request, and what stops a pass.
    """
    if not host.is_repeatable:  # no reply of it is kept: nobody asks
        return _run_again_without_memory(host, replica, prepared, guard, limits)
    with watching_draws(host.hosted.device) as draws:
        resolved, result = _run_again_without_memory(host, replica, prepared, guard, limits)
    return resolved, replace(result, has_drawn=draws.has_drawn)


def _run_again_without_memory(
    host: Host, replica: Replica, prepared: Prepared, guard: PassGuard, limits: Limits
) -> tuple[Resolved, PassResult]:
    """Run a pass, once more where the device had no memory left and keeps some that nobody uses."""
    device = host.hosted.device
    try:
        return _run_plan(host, replica, prepared, guard, limits)
    except ServiceError as error:
        if error.reason is not ErrorReason.OUT_OF_MEMORY or not keeps_memory(device):
            raise
    give_back_cache(device)
    return _run_plan(host, replica, prepared, guard, limits)


def _run_plan(
    host: Host, replica: Replica, prepared: Prepared, guard: PassGuard, limits: Limits
) -> tuple[Resolved, PassResult]:
    plan = prepared.plan
    names = [entry.name for entry in plan.inputs]
    with domain_errors(host.hosted):
        guard.check()
        arguments = build_arguments(
            host.hosted, plan.inputs, prepared.payloads.inputs, prepared.images, guard
        )
        constants = Constants.of(host, plan, prepared.payloads)
        sources = [
            SourcePass.of(host, source, prepared.payloads.sources[i], prepared.source_images[i], guard)
            for i, source in enumerate(plan.sources)
        ]
        forms = {source.name: source.form for source in sources}
        if plan.start_at is not None:
            return _run_from_start(host, replica, plan, arguments, constants, sources, guard, limits)
        signature = signature_of(names, arguments) if plan.inputs else host.example_signature
        called = split_arguments(names, arguments)
        kinds = host.kinds(plan.taps, plan.edits)
        recording = host.record(signature, guard, kinds)
        try:
            resolved, _ = resolve_plan(host, plan, signature, recording, limits, forms)
        except ServiceError as error:
            if not host.may_differ(error):
                raise
            recording = host.record_data(called, guard, kinds)
            surgery = plan_surgery(
                plan.edits, plan.objective, recording, {name: form.recording for name, form in forms.items()}
            )
            resolved = resolve_taps(plan.taps, recording, limits.max_reply_bytes, surgery)
        resolved = rehearse_plan(host, plan, resolved, signature, limits, forms, guard)
        check_constants(resolved, constants)
        found = found_values(replica, resolved, sources, guard)
        work = make_work(resolved, constants.edits, constants.objective, found)
        work = replace(work, graph=host.recorder.graph() if "fx" in kinds else None)
        with domain_errors(host.hosted, resolved.memory_bytes(signature)):
            result = run_pass(replica, called, resolved.targets, work, guard, constants.taps)
    check_byte_count(result.byte_count, limits.max_reply_bytes)  # a model may decide on its data
    return resolved, result


def _run_from_start(
    host: Host,
    replica: Replica,
    plan: Plan,
    arguments: Sequence[Argument],
    constants: Constants,
    sources: Sequence[SourcePass],
    guard: PassGuard,
    limits: Limits,
) -> tuple[Resolved, PassResult]:
    at, (value,) = plan.start_at, arguments
    assert at is not None
    signature = start_signature(host, plan, at)
    assert isinstance(value, torch.Tensor)
    assert host.meta is not None  # models without it, and those that take lists, are refused before
    recording = host.record(signature, guard, host.kinds(plan.taps, plan.edits))
    forms = {source.name: source.form for source in sources}
    resolved, start = resolve_plan(host, plan, signature, recording, limits, forms)
    assert start is not None
    called = split_arguments([entry.name for entry in signature], [entry.make("meta") for entry in signature])
    check_constants(resolved, constants)
    found = found_values(replica, resolved, sources, guard)
    work = make_work(resolved, constants.edits, constants.objective, found)
    passing = replace(
        replica, module=make_replica(replica.module)
    )  # whose state, half of it without data, goes with it
    session: StartSession | None = None
    try:
        session = StartSession(passing.module, start.target, laid_out(value, start.strides))
        work = replace(work, start=session)
        return resolved, run_pass(passing, called, resolved.targets, work, guard, constants.taps)
    except StartMixedError as mixed:
        raise needs_more(at, str(mixed)) from None
    except ServiceError:
        raise
    except Exception as error:
        if session is not None and session.has_begun:
            raise
        raise needs_data(at, first_line(error)) from None
