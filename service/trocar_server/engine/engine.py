"""Engine: runs plans on deployed models, for callers on one event loop."""

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from trocar_server.config import EngineConfig, Limits
from trocar_server.decoding.pixels import DEFAULT_CONVERSION, Conversion
from trocar_server.engine.compiled.variants import CompiledVariants
from trocar_server.engine.execute.eager import Eager
from trocar_server.engine.execute.operand_checks import check_operands
from trocar_server.engine.generate.generation import Generation, start
from trocar_server.engine.generate.kept_caches import KeptCaches
from trocar_server.engine.generate.sampling import Sampling
from trocar_server.engine.host.checked_plan import CheckedPlan
from trocar_server.engine.host.deployment import Deployment
from trocar_server.engine.host.deployment_identity import deployment_identity, description
from trocar_server.engine.host.deployments import Deployments
from trocar_server.engine.host.pace_checks import refuse_long
from trocar_server.engine.reply_cache import KeptReply, Key, ReplyCache, key_of, with_own_memory
from trocar_server.engine.request.payload_layout import split_payloads
from trocar_server.engine.request.plan import Payload, Payloads, Plan, Signature, row_count
from trocar_server.engine.resolve.pass_memory import memory_limit
from trocar_server.engine.run.bound_call import Prepared
from trocar_server.engine.run.call import Call
from trocar_server.engine.run.checks import Checks
from trocar_server.engine.run.extraction import Extraction
from trocar_server.engine.run.pass_errors import domain_errors
from trocar_server.engine.run.pass_result import FeatureMap
from trocar_server.engine.run.preparation import Preparation
from trocar_server.engine.run.runner import DeclinedError, ExecutorFailedError, PassCall, run_call
from trocar_server.engine.run.stream_statistics import StreamStatistics
from trocar_server.engine.schedule.admission import Admission, Reservation, with_budgets
from trocar_server.engine.schedule.device import DeviceThread, device_user
from trocar_server.engine.schedule.room import Room
from trocar_server.errors import ServiceError
from trocar_server.models import Catalogue, HostedModel
from trocar_server.models.identity import Identity, settings_of
from trocar_server.surgery import PassGuard

Result = TypeVar("Result")

_LIST_WAIT_S = 0.02
_START_WAIT_S = 10.0
"""For what a server does after its start, or a trainer."""


class Engine:
    """Runs plans on the models of a catalogue. Every method belongs to one event loop.

    Args:
        catalogue: The models that can be loaded.
        owner: The thread that calls torch, started.
        limits: Limits of a call.
        data_dir: Folder of the weights.
        replica_counts: Replicas by model id; 1 where absent.
        config: Execution of passes without edits and gradients.
        conversion: How images are converted to RGB.
        kept_dir: Folder of compiled variants that are kept for the next process; None keeps none.

    Attributes:
        deployments: The models in memory.
        deployment: Returns one of them that the current caller may use; see `Deployments.find`.
        run: Runs work on the owner thread; see `DeviceThread.run_guarded`.
        checks: Checks requests before anything is computed.
        preparation: Processes that turn texts, sound and images into tensors.
        compiled: Compiled variants of passes.
        replies: Replies of earlier calls.
        caches: Counts the keys and values that generated texts keep.
        admission: The budgets of all calls.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        owner: DeviceThread,
        limits: Limits,
        data_dir: Path,
        replica_counts: dict[str, int] | None = None,
        config: EngineConfig = EngineConfig(),  # noqa: B008 - frozen
        conversion: Conversion = DEFAULT_CONVERSION,
        kept_dir: Path | None = None,
    ) -> None:
        self.catalogue = catalogue
        self.owner = owner
        limit = memory_limit(limits.max_pass_bytes, owner.device)
        self.limits = with_budgets(limits.model_copy(update={"max_pass_bytes": limit}))
        self.admission = Admission(self.limits)
        self.preparation = Preparation(lambda: self.limits, conversion)
        self.deployments = Deployments(
            catalogue,
            owner,
            lambda: self.limits,
            data_dir,
            replica_counts or {},
            self._forget,
            self._begin,
        )
        self.deployment = self.deployments.find
        self.run = owner.run_guarded
        self.checks = Checks(self.deployment, lambda: self.limits, self.run, self._run_later, self._patience)
        self.caches = KeptCaches()
        self.replies = ReplyCache(limits.feature_cache_bytes)
        self.compiled = CompiledVariants(
            owner, config, lambda: self.limits, data_dir, kept_dir, identify=self.identity
        )
        self._settings = settings_of(config, conversion)

    async def identity(self, deployment: Deployment) -> Identity:
        """Return which model a deployment serves; about a second per GB of weights, see `weights_digest`."""
        return await deployment_identity(deployment, self.deployments.values(), self.owner, self._settings)

    async def description(self, deployment: Deployment) -> Identity:
        """Return the same without the weights, in milliseconds."""
        return await description(deployment, self.owner, self._settings)

    async def serve(self, call: Call, reservation: Reservation) -> Extraction | KeptReply:
        """Check a call, receive its payloads, and run it, or return the reply of an earlier equal call.

        Args:
            call: The call.
            reservation: Proof of its admission; in the end it is for the bytes of the reply.

        Raises:
            ServiceError: Whatever is wrong with the request, or prevents the pass.
        """
        if self.needs_processing(call.plan):
            call = await self._processed(call, reservation)
        key = call.key
        checked = None if key is None else self.deployments.checked(key, call.plan, self.limits)
        if checked is None:
            checked = await self._check(call, reservation)
        reply_bytes, rows, pool = checked.byte_count, checked.rows, checked.deployment.pool
        expected_s = pool.throughput.known_seconds(rows)
        if call.arrived is not None:  # nothing is awaited before its bytes: checked and reserved in one step
            reservation.reserve(call.announced_bytes + reply_bytes, rows, seconds=expected_s)
            if checked.has_images:  # without images to decode it waits for its replica at once
                pool.check(call.deadline, rows, checked.plan.execution.priority)
            received = call.arrived()
        else:
            _check_room(checked, call.announced_bytes, call.deadline, reservation)
            with call.phase("receive"):
                received = await call.receive(reservation)
            reservation.reserve(reply_bytes, rows, seconds=expected_s)
        keeping = call.keeping
        place = None if keeping is None else await key_of(keeping.question, received)
        if place is not None and (kept := self.replies.get(place.question.owner, place.digest)) is not None:
            reservation.settle(kept.byte_count)  # the cache may drop it while it is sent
            return kept
        payloads = call.processed or Payloads(received)
        if checked.has_more_than_inputs:
            payloads = call.processed or split_payloads(checked.plan, received, call.stored)
            await check_operands(checked.plan, payloads)
        with call.phase("prepare"):
            if checked.has_images:
                prepared = await self.preparation.prepare(checked, payloads, call.deadline, Room(reservation))
            else:
                prepared = Prepared(checked, payloads, *checked.no_images)
        del received, payloads
        extraction = await self.extract(prepared, call.deadline)
        del prepared
        if place is not None and keeping is not None:
            await self._keep(place, checked, extraction, keeping.describe)
        reservation.settle(extraction.byte_count)
        return extraction

    def needs_processing(self, plan: Plan) -> bool:
        """Whether a plan has inputs that only the model's own processor turns into arguments.

        Raises:
            ServiceError: `UNKNOWN_MODEL` or `MODEL_NOT_LOADED`.
        """
        return plan.needs_processing or (
            plan.has_images and self.preparation.needs_processing(self.deployment(plan.model_id).hosted, plan)
        )

    async def process_inputs(
        self, plan: Plan, payloads: Payloads, deadline: float | None, room: Room | None = None
    ) -> tuple[Plan, Payloads]:
        """Turn texts and sound into arguments by the processor of the model that is loaded in the end.

        Args:
            plan: The request.
            payloads: Its payloads.
            deadline: A time of `time.monotonic()` in seconds, or None.
            room: Of the call; grows by the bytes of the arguments.

        Raises:
            ServiceError: As `Preparation.process`; `UNKNOWN_MODEL` or `MODEL_NOT_LOADED`.
        """
        room = Room() if room is None else room
        while True:
            hosted = self.catalogue.loaded(plan.model_id)
            result = await self.preparation.process(hosted, plan, payloads, deadline, room)
            if self.catalogue.loaded(plan.model_id).processor_version == hosted.processor_version:
                return result
            del result
            room.give_back()

    async def _processed(self, call: Call, reservation: Reservation) -> Call:
        """Receive a call and process its inputs, without which its shapes are not known."""
        plan = call.plan
        self.deployment(plan.model_id)  # raises for a model that is not there, before anything is received
        rows = next((entry.row_count for entry in plan.unprocessed), row_count(plan.inputs))
        reservation.check(call.announced_bytes, rows)
        with call.phase("receive"):
            received = await call.receive(reservation)
        payloads = split_payloads(plan, received, call.stored)
        plan, payloads = await self.process_inputs(plan, payloads, call.deadline, Room(reservation))
        return replace(
            call,
            plan=plan,
            announced_bytes=0,
            receive=_nothing,
            key=None,
            keeping=None,
            arrived=None,
            processed=payloads,
        )

    def check_known(
        self, plan: Plan, key: bytes, announced_bytes: int, deadline: float | None, reservation: Reservation
    ) -> None:
        """Refuse a call that does not fit now, before its payloads, if an equal one was checked before.

        Args:
            plan: What the call asks for.
            key: Of its checked plan; see `Call.key`.
            announced_bytes: Bytes of its payloads.
            deadline: Of the call, as a time of `time.monotonic()`; None without one.
            reservation: Proof of its admission; nothing is reserved.

        Raises:
            ServiceError: As `serve` for the model, the budgets and the queue.
        """
        checked = self.deployments.checked(key, plan, self.limits)
        if checked is not None:
            _check_room(checked, announced_bytes, deadline, reservation)

    async def _check(self, call: Call, reservation: Reservation) -> CheckedPlan:
        """Check the plan of a call, and keep it for equal ones."""
        plan, key = call.plan, call.key
        self.deployment(plan.model_id)  # raises for a model that is not there, whatever its size
        reservation.check(call.announced_bytes, row_count(plan.inputs))
        with call.phase("check"):
            checked = await self.checks.check(plan, call.deadline)
        checked = replace(checked, is_eager=self.compiled.is_eager(checked))
        if key is not None:
            self.deployments.keep_checked(key, checked)
        return checked

    async def _keep(
        self, key: Key, checked: CheckedPlan, extraction: Extraction, describe: Callable[[Extraction], bytes]
    ) -> None:
        """Cache a reply, unless another pass could differ or the model was unloaded meanwhile."""
        if extraction.has_drawn:
            return
        plan, version = checked.plan, checked.deployment.version
        reply = KeptReply(version, describe(extraction), extraction.payloads, plan.model_id, checked.rows)
        if not self.replies.has_room_for(reply):
            return
        reply = await with_own_memory(reply)
        with suppress(ServiceError):  # it was unloaded
            if self.deployment(plan.model_id).reply_version == version:
                self.replies.put(key.question.owner, key.digest, reply)

    def _patience(self) -> float | None:
        """Return the seconds that a list may wait for the owner thread: behind passes hardly any."""
        if not self.owner.is_busy:
            return None
        is_passing = any(deployment.pool.leased_count for deployment in self.deployments.values())
        return _LIST_WAIT_S if is_passing else _START_WAIT_S

    def _run_later(self, work: Callable[[], None]) -> None:
        """Queue work for the owner thread that nobody waits for."""
        self.owner.submit(work).add_done_callback(lambda done: done.cancelled() or done.exception())

    async def extract(
        self, prepared: Prepared, deadline: float | None = None, statistics: StreamStatistics | None = None
    ) -> Extraction:
        """Run one pass.

        Args:
            prepared: The checked plan and its inputs.
            deadline: A time of `time.monotonic()` in seconds, or None.
            statistics: Accumulates the statistics, all or none; the extraction is then without them.
        """
        checked = prepared.checked
        if checked.work > checked.deployment.pool.pace.safe_work and checked.signature is not None:
            await self.refuse_long(checked.deployment, checked.signature, checked.work, deadline)
        if checked.is_eager or self.compiled.is_eager(checked):
            extraction = await self._extract_eagerly(prepared, deadline, statistics)
        else:
            extraction = await self._extract_compiled(prepared, deadline, statistics)
        if checked.plan.processed:
            extraction = replace(extraction, processed=checked.plan.processed)
        if extraction.copies is not None:  # without the lease: the next pass runs meanwhile
            await extraction.copies.arrived()
        if checked.reads_tokens:
            maps = await self.spelled(checked.deployment.hosted, extraction.feature_maps)
            extraction = replace(extraction, feature_maps=maps)
        return extraction

    async def spelled(
        self, hosted: HostedModel, feature_maps: tuple[FeatureMap, ...]
    ) -> tuple[FeatureMap, ...]:
        """Return feature maps with the texts of the tokens that lenses have read.

        Raises:
            ServiceError: As `Processor.texts`.
        """
        ids = {place: entry.read_tokens for place, entry in enumerate(feature_maps) if entry.read_tokens}
        wanted = sorted(set().union(*ids.values()))
        if not wanted:
            return feature_maps
        texts = await self.preparation.processor.texts(hosted, [[each] for each in wanted], self.limits)
        known = dict(zip(wanted, texts, strict=True))
        return tuple(
            replace(entry, token_texts={each: known[each] for each in sorted(ids[place])})
            if place in ids
            else entry
            for place, entry in enumerate(feature_maps)
        )

    async def refuse_long(
        self, deployment: Deployment, signature: Signature, work: int, deadline: float | None
    ) -> None:
        """Refuse a pass that would take too long; see `host.pace_checks`.

        Raises:
            ServiceError: `PASS_TOO_LONG`.
        """
        guard, limit_s = PassGuard(deadline), self.limits.max_pass_s
        left_s = guard.left_s
        if not deployment.pool.pace.may_exceed(work, limit_s if left_s is None else min(left_s, limit_s)):
            return

        def check() -> None:
            with domain_errors(deployment.hosted):
                refuse_long(deployment, signature, work, guard, limit_s)

        await self.run(check, guard, deadline)

    async def _extract_compiled(
        self, prepared: Prepared, deadline: float | None, statistics: StreamStatistics | None
    ) -> Extraction:
        """Run one pass on a compiled variant, or eagerly until there is one."""
        checked = prepared.checked
        variant, failure = self.compiled.find(checked), ""
        if variant is not None and variant.is_ready:
            try:
                return await self.compiled.extract(variant, prepared, deadline, statistics)
            except ExecutorFailedError as error:
                failure = str(error)
            except DeclinedError:
                pass  # eager it is
        why = self.compiled.why_exact(checked, variant)
        extraction = await self._extract_eagerly(prepared, deadline, statistics)
        if variant is not None:
            self.compiled.was_asked(variant, prepared, failure)
        if not why:
            return extraction
        asked = self.compiled.asked(checked)
        return replace(extraction, report=replace(extraction.report, asked=asked, reason=why))

    async def _extract_eagerly(
        self, prepared: Prepared, deadline: float | None, statistics: StreamStatistics | None
    ) -> Extraction:
        guard, checked = PassGuard(deadline), prepared.checked
        call = PassCall(prepared, guard, time.perf_counter(), statistics)
        rows, priority = checked.rows, checked.plan.execution.priority
        device_user.set(checked.plan.model_id)
        async with checked.deployment.pool.lease(deadline, rows=rows, priority=priority) as replica:
            return await self.run(partial(run_call, Eager(replica), call), guard, deadline)

    async def start_generation(
        self, requests: Sequence[tuple[Plan, Payloads]], sampling: Sampling, deadline: float | None
    ) -> Generation:
        """Check a run that generates text; nothing is computed yet.

        Args:
            requests: Of each prompt, with taps, edits and payloads; processed.
            sampling: How tokens are chosen.
            deadline: A time of `time.monotonic()` in seconds, or None.

        Raises:
            ServiceError: With the reason why it cannot run.
        """
        plan, payloads = requests[0]
        await check_operands(plan, payloads)  # prompts share their tensors
        deployment = self.deployment(plan.model_id)
        is_awaited = self.owner.is_awaited
        return await start(
            self.checks, deployment, requests, sampling, self.run, is_awaited, self.caches, deadline
        )

    def _begin(self, deployment: Deployment) -> Awaitable[None]:
        """Start to restore and build the compiled variants that a loaded model is to have at once."""
        return self.compiled.prepare(deployment)

    def _forget(self, deployment: Deployment) -> Awaitable[None]:
        """Drop what was cached of a model that is served no longer."""
        self.replies.drop(deployment.version)
        return self.compiled.forget(deployment)


def _check_room(
    checked: CheckedPlan, announced_bytes: int, deadline: float | None, reservation: Reservation
) -> None:
    """Refuse a call whose payloads have not come yet, if it does not fit now."""
    rows, pool = checked.rows, checked.deployment.pool
    seconds = pool.throughput.known_seconds(rows)
    reservation.check(announced_bytes + checked.byte_count, rows, seconds=seconds)
    pool.check(deadline, rows, checked.plan.execution.priority)


async def _nothing(_: Reservation) -> list[Payload]:
    """Receive a call whose payloads have come."""
    return []
