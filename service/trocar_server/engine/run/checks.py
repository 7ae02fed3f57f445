"""Request checks before anything is computed. Every method belongs to one event loop."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Protocol, TypeVar

from trocar_api.reasons import ErrorReason
from trocar_server.config import Limits
from trocar_server.engine.execute.arguments import (
    build_arguments,
    check_images,
    check_lists,
    check_named,
    predicted_signature,
)
from trocar_server.engine.execute.binding import bound_inputs
from trocar_server.engine.host.checked_plan import CheckedPlan, needed_bytes
from trocar_server.engine.host.deployment import Deployment, RecordedSource, RecordedSources
from trocar_server.engine.host.recordings import DataNeededError, MadeDataRefusedError, fill
from trocar_server.engine.request.plan import (
    EditRequest,
    FlagInput,
    Payload,
    Plan,
    Signature,
    TensorInput,
    TensorListInput,
)
from trocar_server.engine.resolve.planner import Resolved, resolve_taps
from trocar_server.engine.resolve.surgery_plan import NO_SURGERY, plan_surgery
from trocar_server.engine.resolve.text_spans import refuse_spans
from trocar_server.engine.run.logit_lens import check_lens
from trocar_server.engine.run.pass_errors import domain_errors
from trocar_server.engine.run.preview import Preview, assumed_signature, make_preview
from trocar_server.engine.run.resolving import known_signature, resolve_plan, resolve_with_meta_pass
from trocar_server.engine.schedule.device import device_user
from trocar_server.errors import ServiceError
from trocar_server.surgery import PassGuard, Recording
from trocar_server.surgery.axes.layout import Layouts
from trocar_server.surgery.recording.symbolic import has_symbolic_parts, import_symbolic_parts
from trocar_server.tasks import begin

Result = TypeVar("Result")

NO_PAYLOADS: Mapping[str, Payload] = MappingProxyType({})
"""Of a dry run whose inputs the server did not process."""

_KNOWN_BEFORE_INPUTS = (
    ErrorReason.UNKNOWN_MODULE,
    ErrorReason.INVALID_SELECTOR,
    ErrorReason.EDIT_NOT_REACHED,
)
"""Errors of a tap that do not depend on the inputs."""


class Run(Protocol):
    """Runs work that checks the guard on the owner thread; see `Engine.run`."""

    def __call__(
        self, work: Callable[[], Result], guard: PassGuard, deadline: float | None
    ) -> Awaitable[Result]:
        """Run it and return its result."""
        ...


class Checks:
    """Checks and describes requests by recorded passes.

    Args:
        deployment_of: Returns a loaded model by its id.
        limits: Returns the current limits of a call.
        run: Runs recordings on the owner thread.
        later: Queues work for the owner thread that nobody waits for.
        patience: Returns how many seconds a list may wait for that thread; None for as long as it takes.
    """

    def __init__(
        self,
        deployment_of: Callable[[str], Deployment],
        limits: Callable[[], Limits],
        run: Run,
        later: Callable[[Callable[[], None]], object],
        patience: Callable[[], float | None],
    ) -> None:
        self._later, self._patience = later, patience
        self._deployment_of = deployment_of
        self._limits = limits
        self._run = run
        self._importing: set[asyncio.Task[None]] = set()
        self._describing: dict[int, asyncio.Task[Layouts]] = {}
        """By the id of the deployment, which its task keeps."""

    async def recording(self, model_id: str, signature: Signature | None = None) -> Recording:
        """Return a recorded pass, on the model's example input or on inputs of a given signature."""
        deployment = self._deployment_of(model_id)
        return deployment.example if signature is None else await self._record(deployment, signature)

    async def described(self, model_id: str, signature: Signature | None = None) -> Recording:
        """Return a recorded pass as `recording` does, with what the dimensions of its values mean.

        Without it while that is not known and the thread that computes is busy: a list of modules does not
        wait behind a pass.
        """
        recording = await self.recording(model_id, signature)
        if recording.layouts is not None:
            return recording
        deployment, wait_s = self._deployment_of(model_id), self._patience()
        known = deployment.layouts.find(deployment.example_signature)
        if known is not None:
            return replace(recording, layouts=known)
        making = self._describing.get(id(deployment))
        if making is None:
            making = self._describing[id(deployment)] = asyncio.create_task(self._layouts(deployment))
            making.add_done_callback(partial(self._described, id(deployment)))
        done, _ = await asyncio.wait((making,), timeout=wait_s)
        return replace(recording, layouts=making.result()) if done else recording

    def _described(self, key: int, making: "asyncio.Task[Layouts]") -> None:
        del self._describing[key]
        if not making.cancelled():
            making.exception()  # retrieved: a list that did not wait does not ask for it

    async def _layouts(self, deployment: Deployment) -> Layouts:
        """Return the layouts of a model's example."""
        known, guard = deployment.example_signature, PassGuard()
        make = partial(deployment.layouts.make, known, guard)
        if not deployment.needs_data(known):
            return await self._run(make, guard, None)
        async with deployment.pool.lease(None, rows=_rows(known)):
            return await self._run(make, guard, None)

    async def preview(
        self, plan: Plan, deadline: float | None = None, payloads: Mapping[str, Payload] = NO_PAYLOADS
    ) -> Preview:
        """Return what a plan would return and need.

        Nothing is computed, except where the model, or a selector, does not work with made-up data and some
        of the inputs are there: then these, with made-up values for the others.

        Args:
            plan: The plan.
            deadline: A time of `time.monotonic()` in seconds, or None.
            payloads: Those of its inputs that the caller sent or the server has processed, by name.

        Raises:
            ServiceError: As `check` does.
        """
        deployment = self._deployment_of(plan.model_id)
        refuse_spans(plan)
        plan = _with_example(deployment, _bound(deployment, plan))
        images_bytes = check_images(deployment.hosted, plan.inputs, self._limits())
        check_lists(deployment.hosted, plan.inputs)
        if plan.inputs and plan.start_at is None:
            check_named(deployment.hosted, plan.inputs)
        signature = known_signature(deployment, plan) or assumed_signature(deployment, plan.inputs)
        sources = await self._recorded_sources(deployment, plan, deadline)
        recording: Recording | None = None
        try:
            recording = await self._record(deployment, signature, plan, deadline)
            resolved, _ = resolve_plan(deployment, plan, signature, recording, self._limits(), sources)
        except ServiceError as error:  # on made-up data
            if not payloads or not deployment.may_differ(error, recording):
                raise
            recording = await self._record_processed(deployment, plan, signature, payloads, deadline)
            resolved, _ = resolve_plan(deployment, plan, signature, recording, self._limits(), sources)
        resolved = await self._after_meta_pass(deployment, plan, resolved, signature, sources, deadline)
        check_lens(deployment, plan, resolved)
        return make_preview(resolved, recording, needed_bytes(deployment, resolved, signature) + images_bytes)

    async def check_taps(self, plan: Plan) -> None:
        """Check a stream's taps and edits against the model's example input, before any batch is received.

        Raises:
            ServiceError: Any error that can be found without inputs.
        """
        await self._check_example(self._deployment_of(plan.model_id), plan)

    async def check(self, plan: Plan, deadline: float | None = None) -> CheckedPlan:
        """Check a plan before the bytes of its inputs are received.

        Args:
            plan: The plan.
            deadline: A time of `time.monotonic()` in seconds, or None.

        Raises:
            ServiceError: Any error that can be found without the inputs.
        """
        deployment, limits = self._deployment_of(plan.model_id), self._limits()
        refuse_spans(plan)
        asked, plan = plan, _bound(deployment, plan)
        unresolved = CheckedPlan(
            plan, deployment, limits, asked=asked, differed_count=deployment.differed_count
        )
        check_images(deployment.hosted, plan.inputs, limits)
        check_lists(deployment.hosted, plan.inputs)
        if plan.start_at is None:
            check_named(deployment.hosted, plan.inputs)
        check_lens(deployment, plan, None)
        signature = known_signature(deployment, plan)
        if signature is None:
            if not (plan.has_flags or plan.has_made):  # another pass than the example's
                await self._check_example(deployment, plan, deadline)
            return unresolved
        try:
            recording = await self._record(deployment, signature, plan, deadline)
            recorded_sources = await self._recorded_sources(deployment, plan, deadline)
        except MadeDataRefusedError:  # the caller's own data may be accepted
            return unresolved
        try:
            resolved, _ = resolve_plan(deployment, plan, signature, recording, limits, recorded_sources)
            resolved = await self._after_meta_pass(
                deployment, plan, resolved, signature, recorded_sources, deadline
            )
        except ServiceError as error:
            if not deployment.may_differ(error, recording):
                raise
            return replace(unresolved, doubt=error)
        check_lens(deployment, plan, resolved)
        return replace(unresolved, signature=signature, recording=recording, resolved=resolved)

    async def check_edits(self, model_id: str, edits: Sequence[EditRequest]) -> None:
        """Check edits against a model's example input, for any later request.

        Raises:
            ServiceError: Any error of theirs that does not depend on the inputs.
        """
        deployment = self._deployment_of(model_id)
        plan = Plan(model_id, (), (), 0, edits=tuple(edits))
        try:
            plan_surgery(edits, None, await self._example(deployment, plan), {})
        except ServiceError as error:
            if not deployment.may_differ(error) and error.reason is not ErrorReason.EDIT_SHAPE_MISMATCH:
                raise

    async def _check_example(self, deployment: Deployment, plan: Plan, deadline: float | None = None) -> None:
        """Check a plan whose batch is not known yet: its images, or a stream's batches, come later.

        Raises:
            ServiceError: An error that no inputs can change; the others are found when the batch is there.
        """
        try:
            self._resolve_example(plan, await self._example(deployment, plan, deadline))
        except ServiceError as error:
            if error.reason in _KNOWN_BEFORE_INPUTS and not deployment.may_differ(error):
                raise

    async def _example(self, deployment: Deployment, plan: Plan, deadline: float | None = None) -> Recording:
        """Return a recorded pass on the example input, with the nodes and functions that the taps need."""
        if not deployment.kinds(plan.taps, plan.edits):
            return deployment.example
        return await self._record(deployment, deployment.example_signature, plan, deadline)

    def _resolve_example(self, plan: Plan, recording: Recording) -> None:
        unknown = {source.name: None for source in plan.sources}
        surgery = plan_surgery(plan.edits, None, recording, unknown)
        if plan.objective is not None:  # what it scores, and with that the reach, comes with the labels
            surgery = NO_SURGERY
        resolve_taps(plan.taps, recording, self._limits().max_reply_bytes, surgery)

    async def _recorded_sources(
        self, deployment: Deployment, plan: Plan, deadline: float | None
    ) -> RecordedSources:
        """Return the signatures of the sources' inputs, with recordings where the signatures are known."""
        outcome: dict[str, RecordedSource] = {}
        for source in plan.sources:
            check_images(deployment.hosted, source.inputs, self._limits())
            check_lists(deployment.hosted, source.inputs)
            check_named(deployment.hosted, source.inputs)
            signature = predicted_signature(deployment.hosted, source.inputs)
            recording = await self._record(deployment, signature, None, deadline) if signature else None
            outcome[source.name] = RecordedSource(signature, recording)
        return outcome

    async def _after_meta_pass(
        self,
        deployment: Deployment,
        plan: Plan,
        resolved: Resolved,
        signature: Signature,
        recorded_sources: RecordedSources,
        deadline: float | None,
    ) -> Resolved:
        if not resolved.needs_meta_pass:
            return resolved
        guard = PassGuard(deadline)

        def run_meta_pass() -> Resolved:
            with domain_errors(deployment.hosted):
                return resolve_with_meta_pass(
                    deployment, plan, resolved, signature, self._limits(), recorded_sources, guard
                )

        return await self._run(run_meta_pass, guard, deadline)

    async def _record(
        self,
        deployment: Deployment,
        signature: Signature,
        plan: Plan | None = None,
        deadline: float | None = None,
    ) -> Recording:
        kinds = deployment.kinds(plan.taps, plan.edits) if plan else frozenset[str]()
        outcome = deployment.recorded(signature, kinds)
        if outcome is None:
            outcome = await self._recorded_now(deployment, signature, kinds, plan, deadline)
            if deployment.may_extend:
                self._extend_later(deployment)
        return outcome

    def _extend_later(self, deployment: Deployment) -> None:
        """Let predictions be extended, once what that takes has been imported beside the owner thread."""
        if has_symbolic_parts.is_set():
            self._later(deployment.extend_predictions)
            return
        begin(self._import_and_extend(deployment), self._importing)

    async def _import_and_extend(self, deployment: Deployment) -> None:
        await asyncio.to_thread(import_symbolic_parts)
        self._later(deployment.extend_predictions)

    async def _record_processed(
        self,
        deployment: Deployment,
        plan: Plan,
        signature: Signature,
        payloads: Mapping[str, Payload],
        deadline: float | None,
    ) -> Recording:
        """Record a pass on the inputs that are there; a dry run has no data of the rest, which is made up."""
        guard, kinds = PassGuard(deadline), deployment.kinds(plan.taps, plan.edits)
        hosted = deployment.hosted
        known = [entry for entry in plan.inputs if entry.name in payloads]

        def record() -> Recording:
            own = [payloads[entry.name] for entry in known]
            built = build_arguments(hosted, known, own, [[] for _ in known])
            given = dict(zip([entry.name for entry in known], built, strict=True))
            names = [entry.name for entry in signature]
            made = [given.get(entry.name, fill(entry, hosted.device, 1)) for entry in signature]
            with domain_errors(hosted):
                return deployment.record_data(hosted.forward.called(names, made), guard, kinds)

        async with deployment.pool.lease(deadline, rows=_rows(signature)):
            return await self._run(record, guard, deadline)

    async def _recorded_now(
        self,
        deployment: Deployment,
        signature: Signature,
        kinds: frozenset[str],
        plan: Plan | None,
        deadline: float | None,
    ) -> Recording:
        def check(recording: Recording) -> None:
            if recording.is_symbolic and plan and not plan.edits:  # other data may take another branch
                resolve_taps(plan.taps, recording, self._limits().max_reply_bytes)

        guard = PassGuard(deadline)
        device_user.set(deployment.hosted.spec.model_id)

        def record(*, may_use_data: bool) -> Recording:
            with domain_errors(deployment.hosted, passes=(DataNeededError,)):
                return deployment.record(signature, guard, kinds, check, may_use_data=may_use_data)

        if not deployment.needs_data(signature):
            with suppress(DataNeededError):
                return await self._run(partial(record, may_use_data=False), guard, deadline)
        # A real pass, so it waits in the model's queue like any other.
        async with deployment.pool.lease(deadline, rows=_rows(signature)):
            return await self._run(partial(record, may_use_data=True), guard, deadline)


def _bound(deployment: Deployment, plan: Plan) -> Plan:
    """Name the arguments of a plan, of its sources and of its start, and number its classes.

    The very plan where nothing changes.
    """
    bound, start = partial(bound_inputs, deployment.hosted), plan.start_at
    inputs = bound(plan.inputs) if start is None else plan.inputs  # else the value to start from
    if start is not None and start.inputs:
        own = tuple(entry for entry in bound(start.inputs) if isinstance(entry, TensorInput))
        start = replace(start, inputs=own)
    sources = tuple(replace(source, inputs=bound(source.inputs)) for source in plan.sources)
    if plan.objective is not None and plan.objective.has_names:
        numbered = plan.objective.numbered(plan.model_id, deployment.hosted.categories)
        plan = replace(plan, objective=numbered)
    if (inputs, sources, start) == (plan.inputs, plan.sources, plan.start_at):
        return plan
    return replace(plan, inputs=inputs, sources=sources, start_at=start)


def _with_example(deployment: Deployment, plan: Plan) -> Plan:
    """Return a dry run of flags alone with the example input beside them; any other plan as it is."""
    is_flags = plan.has_flags and all(isinstance(entry, FlagInput) for entry in plan.inputs)
    if not is_flags or plan.start_at is not None:
        return plan
    example = tuple(
        TensorListInput(entry.name, entry.dtype, entry.shapes)
        if entry.is_list
        else TensorInput(entry.name, entry.dtype, entry.shapes[0])
        for entry in deployment.example_signature
    )
    return replace(plan, inputs=(*example, *plan.inputs))


def _rows(signature: Signature) -> int:
    """Return the number of samples of a signature, as far as its shapes tell."""
    first = next(iter(signature), None)
    if first is None or first.is_list:
        return len(first.shapes) if first else 1
    return max(1, first.shapes[0][0]) if first.shapes[0] else 1
