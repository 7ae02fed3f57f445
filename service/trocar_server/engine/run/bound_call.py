"""Bound call: a checked plan with its tensors on the device. Owner thread only, but for `Prepared`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from trocar_server.engine.execute.arguments import (
    Argument,
    build_arguments,
    signature_of,
)
from trocar_server.engine.execute.collecting import copied
from trocar_server.engine.execute.prepared_images import DecodedImages
from trocar_server.engine.host.checked_plan import CheckedPlan
from trocar_server.engine.host.deployment import RecordedSources
from trocar_server.engine.host.pace_checks import refuse_long
from trocar_server.engine.host.recordings import Called
from trocar_server.engine.request.plan import Payloads, Plan, Signature
from trocar_server.engine.resolve.pass_work import pass_work
from trocar_server.engine.resolve.planner import Resolved
from trocar_server.engine.run.operand_tensors import NO_OPERANDS, OperandTensors
from trocar_server.engine.run.resolving import resolve_plan
from trocar_server.engine.run.source_passes import SourcePass
from trocar_server.surgery import PassGuard, Recording


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
        """Return a copy for a pass that may have to run again: with own tensors where it may write to them.

        On the CPU the arguments are the payload.
        """
        recording = self.checked.recording or self.checked.deployment.recorded(self.signature)
        if recording is not None and not recording.overwrites_inputs:
            return self
        arguments: list[Any] = [copied(argument) for argument in self.arguments]
        called = self.checked.deployment.hosted.forward.called(self.checked.argument_names, arguments)
        return replace(self, arguments=arguments, called=called)

    @cached_property
    def recorded_sources(self) -> RecordedSources:
        """Signatures and recordings of the sources' inputs."""
        return {source.name: source.recorded for source in self.sources}
