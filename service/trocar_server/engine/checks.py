"""What can be said of a request before anything is computed. Every method belongs to one event loop."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from trocar_api.reasons import ErrorReason
from trocar_server.config import Limits
from trocar_server.engine.hosting import Host, SourceForm, SourceForms
from trocar_server.engine.inputs import check_images, predicted_signature
from trocar_server.engine.passes import domain_errors
from trocar_server.engine.plan import EditRequest, Plan, Signature
from trocar_server.engine.planner import Resolved, resolve_taps
from trocar_server.engine.preview import Preview, assumed_signature, make_preview
from trocar_server.engine.surgery_plan import plan_surgery
from trocar_server.engine.work import known_signature, rehearse_plan, resolve_plan
from trocar_server.errors import ServiceError
from trocar_server.surgery import PassGuard, Recording

Result = TypeVar("Result")

_KNOWN_BEFORE_INPUTS = (ErrorReason.UNKNOWN_MODULE, ErrorReason.INVALID_SELECTOR)
"""What is wrong with a tap whatever the inputs will be."""


class Run(Protocol):
    """Runs work that asks the guard on the owner thread; see `Engine.run`."""

    def __call__(
        self, work: Callable[[], Result], guard: PassGuard, deadline: float | None
    ) -> Awaitable[Result]:
        """Run it, and return what it returns."""
        ...


class Checks:
    """Checks and describes requests by recorded passes.

    Args:
        host_of: Returns a loaded model by its id.
        limits: Returns what a call may not exceed now.
        run: Where what has to be recorded is.
    """

    def __init__(self, host_of: Callable[[str], Host], limits: Callable[[], Limits], run: Run) -> None:
        self._host_of = host_of
        self._limits = limits
        self._run = run

    async def recording(self, model_id: str, signature: Signature | None = None) -> Recording:
        """Return what a pass calls, for the model's example input or for inputs of a given form."""
        host = self._host_of(model_id)
        return host.example if signature is None else await self._record(host, signature)

    async def preview(self, plan: Plan, deadline: float | None = None) -> Preview:
        """Tell what a plan would return and need; nothing is computed.

        Raises:
            ServiceError: What `check` raises.
        """
        host = self._host_of(plan.model_id)
        check_images(host.hosted, plan.inputs)
        signature = known_signature(host, plan) or assumed_signature(host, plan.inputs)
        recording = await self._record(host, signature, plan, deadline)
        forms = await self._source_forms(host, plan, deadline)
        resolved, _ = resolve_plan(host, plan, signature, recording, self._limits(), forms)
        resolved = await self._rehearsed(host, plan, resolved, signature, forms, deadline)
        return make_preview(resolved, recording, resolved.memory_bytes(signature))

    async def check_taps(self, plan: Plan) -> None:
        """Check a stream's taps and edits against the model's example input, before any batch has come.

        Raises:
            ServiceError: Anything that can be known without inputs.
        """
        host = self._host_of(plan.model_id)
        try:
            self._resolve_example(plan, await self._example(host, plan))
        except ServiceError as error:
            if error.reason in _KNOWN_BEFORE_INPUTS:
                raise

    async def check(self, plan: Plan, deadline: float | None = None) -> int:
        """Check a plan before the bytes of its inputs have come.

        Args:
            plan: What will be asked for.
            deadline: A time of `time.monotonic()` in seconds, or None.

        Returns:
            Bytes of the values in the reply, 0 where they are not known before the inputs are.

        Raises:
            ServiceError: Anything that can be known without them.
        """
        host = self._host_of(plan.model_id)
        check_images(host.hosted, plan.inputs)
        signature = known_signature(host, plan)
        if signature is None:
            self._resolve_example(plan, await self._example(host, plan, deadline))
            return 0
        recording = await self._record(host, signature, plan, deadline)
        forms = await self._source_forms(host, plan, deadline)
        try:
            resolved, _ = resolve_plan(host, plan, signature, recording, self._limits(), forms)
            resolved = await self._rehearsed(host, plan, resolved, signature, forms, deadline)
        except ServiceError as error:
            if not host.may_differ(error):
                raise
            return 0
        return resolved.byte_count

    async def check_edits(self, model_id: str, edits: Sequence[EditRequest]) -> None:
        """Check edits against a model's example input, for any later request.

        Raises:
            ServiceError: What is wrong with them whatever the inputs will be.
        """
        host = self._host_of(model_id)
        plan = Plan(model_id, (), (), 0, edits=tuple(edits))
        try:
            plan_surgery(edits, None, await self._example(host, plan), {})
        except ServiceError as error:
            if not host.may_differ(error) and error.reason is not ErrorReason.EDIT_SHAPE_MISMATCH:
                raise

    async def _example(self, host: Host, plan: Plan, deadline: float | None = None) -> Recording:
        """Return a recorded pass on the example input, with the nodes and functions that the taps need."""
        if not host.kinds(plan.taps, plan.edits):
            return host.example
        return await self._record(host, host.example_signature, plan, deadline)

    def _resolve_example(self, plan: Plan, recording: Recording) -> None:
        unknown = {source.name: None for source in plan.sources}
        surgery = plan_surgery(plan.edits, None, recording, unknown)
        resolve_taps(plan.taps, recording, self._limits().max_reply_bytes, surgery)

    async def _source_forms(self, host: Host, plan: Plan, deadline: float | None) -> SourceForms:
        """Return the forms of the sources' inputs, recorded where they are known."""
        found: dict[str, SourceForm] = {}
        for source in plan.sources:
            check_images(host.hosted, source.inputs)
            signature = predicted_signature(host.hosted, source.inputs)
            recording = await self._record(host, signature, None, deadline) if signature else None
            found[source.name] = SourceForm(signature, recording)
        return found

    async def _rehearsed(
        self,
        host: Host,
        plan: Plan,
        resolved: Resolved,
        signature: Signature,
        forms: SourceForms,
        deadline: float | None,
    ) -> Resolved:
        if not resolved.needs_rehearsal:
            return resolved
        guard = PassGuard(deadline)

        def rehearse() -> Resolved:
            with domain_errors(host.hosted):
                return rehearse_plan(host, plan, resolved, signature, self._limits(), forms, guard)

        return await self._run(rehearse, guard, deadline)

    async def _record(
        self,
        host: Host,
        signature: Signature,
        plan: Plan | None = None,
        deadline: float | None = None,
    ) -> Recording:
        kinds = host.kinds(plan.taps, plan.edits) if plan else frozenset[str]()
        found = host.recorded(signature, kinds)
        if found is not None:
            return found

        def check(recording: Recording) -> None:
            if recording.is_symbolic and plan and not plan.edits:  # other data may take another way
                resolve_taps(plan.taps, recording, self._limits().max_reply_bytes)

        guard = PassGuard(deadline)

        def record() -> Recording:
            with domain_errors(host.hosted):
                return host.record(signature, guard, kinds, check)

        return await self._run(record, guard, deadline)
