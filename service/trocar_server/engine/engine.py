"""Engine: loads models and runs plans, for callers on one event loop."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from PIL import Image

from trocar_api.reasons import ErrorReason
from trocar_server.config import EngineConfig, Limits
from trocar_server.decoding.pixels import DEFAULT_CONVERSION, Conversion
from trocar_server.engine.compiled.compiled_pass import NotCompiledError
from trocar_server.engine.compiled.variants import CompiledVariants
from trocar_server.engine.execute.arguments import decode_images, has_images
from trocar_server.engine.execute.image_decoder import ImageDecoder
from trocar_server.engine.execute.operand_checks import check_operands
from trocar_server.engine.execute.processor import Processed, Processor
from trocar_server.engine.host.checked_plan import CheckedPlan
from trocar_server.engine.host.deployment import Deployment, make_deployment
from trocar_server.engine.host.repeatable import is_repeatable
from trocar_server.engine.reply_cache import KeptReply, Key, ReplyCache, key_of, with_own_memory
from trocar_server.engine.request.payload_layout import split_payloads
from trocar_server.engine.request.plan import ArgumentInput, Payload, Payloads, Plan, SourceInputs, row_count
from trocar_server.engine.resolve.pass_memory import memory_limit
from trocar_server.engine.resolve.text_spans import has_spans, with_token_rows
from trocar_server.engine.run.call import Call
from trocar_server.engine.run.checks import Checks
from trocar_server.engine.run.extraction import Extraction, extraction_of
from trocar_server.engine.run.run_plan import Prepared, run_plan
from trocar_server.engine.run.stream_statistics import StreamStatistics
from trocar_server.engine.schedule.admission import Admission, Reservation, with_budgets
from trocar_server.engine.schedule.device import DeviceThread
from trocar_server.engine.schedule.lease import ReplicaPool
from trocar_server.engine.transfer import current
from trocar_server.errors import ServiceError, first_line
from trocar_server.models import (
    Catalogue,
    Entry,
    HostedModel,
    ModelSpec,
    ModelState,
    guest_refused,
    load_model,
    prefetch_weights,
)
from trocar_server.processing.inputs import ProcessorInput
from trocar_server.surgery import PassGuard

Result = TypeVar("Result")


@dataclass
class _Room:
    """The share of a reservation that one call's images take."""

    reservation: Reservation | None
    is_alone: bool
    byte_count: int = 0

    def reserve(self, byte_count: int, rows: int) -> None:
        if self.reservation is not None:
            self.reservation.reserve(byte_count, rows, is_alone=self.is_alone)
            self.byte_count += byte_count

    def give_back(self) -> None:
        if self.reservation is not None:
            self.reservation.add(-self.byte_count)


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
    ) -> None:
        self.catalogue = catalogue
        self.owner = owner
        limit = memory_limit(limits.max_pass_bytes, owner.device)
        self.limits = with_budgets(limits.model_copy(update={"max_pass_bytes": limit}))
        self.admission = Admission(self.limits)
        self.decoder = ImageDecoder(conversion)
        self.processor = Processor()
        self.checks = Checks(self.deployment, lambda: self.limits, self.run, self._run_later)
        self._data_dir = data_dir
        self._replica_counts = replica_counts or {}
        self._deployments: dict[str, Deployment] = {}
        self._loading: dict[str, asyncio.Lock] = {}
        self.replies = ReplyCache(limits.feature_cache_bytes)
        self.compiled = CompiledVariants(owner, config, self.limits, data_dir)

    async def load(self, model_id: str) -> Entry:
        """Load a model of the catalogue; does nothing when it is loaded already.

        Raises:
            ServiceError: `UNKNOWN_MODEL`, and any error of loading.
        """
        entry = self._entry_to_load(model_id)
        async with self._loading.setdefault(model_id, asyncio.Lock()):
            if model_id in self._deployments:
                return entry
            if not entry.is_spec_known:
                raise ServiceError(entry.error_reason or ErrorReason.MODEL_INVALID, entry.error_message)
            entry.begin()
            try:
                self._deployments[model_id] = await self.build(
                    entry.spec, self._replica_counts.get(model_id, 1)
                )
            except ServiceError as error:
                entry.fail(error)
                raise
            except Exception as error:
                failed = _load_failure(model_id, error)
                entry.fail(failed)
                raise failed from error
            except BaseException:
                entry.state = ModelState.UNLOADED
                raise
            entry.hosted, entry.state = self._deployments[model_id].hosted, ModelState.LOADED
            return entry

    async def unload(self, model_id: str) -> Entry:
        """Drop a model from memory when its calls have ended; its catalogue entry stays."""
        entry = self._entry_to_load(model_id)
        async with self._loading.setdefault(model_id, asyncio.Lock()):
            deployment = self._forget(model_id)
            if deployment is not None:
                entry.hosted, entry.state = None, ModelState.UNLOADED
                await deployment.pool.drain()
            return entry

    async def build(self, spec: ModelSpec, replicas: int) -> Deployment:
        """Load a model beside those that are served; `replace` serves it.

        Raises:
            ServiceError: Whatever makes loading impossible.
        """
        # A download calls no torch operator and must not block the owner thread.
        await asyncio.to_thread(prefetch_weights, spec, self._data_dir)

        def make() -> Deployment:
            hosted = load_model(spec, self.owner.device, self._data_dir)
            deployment = self._make_deployment(hosted, replicas)
            deployment.is_repeatable = self.replies.max_bytes > 0 and is_repeatable(hosted)
            return deployment

        return await self.owner.run(make)

    def replace(self, deployment: Deployment, replicas: int) -> None:
        """Serve a model from `build`; calls that run on the old one of this id finish there."""
        model_id = deployment.hosted.spec.model_id
        self._forget(model_id)
        self._deployments[model_id] = deployment
        self._replica_counts[model_id] = replicas
        self.catalogue.put(deployment.hosted)

    def remove(self, model_id: str) -> None:
        """Drop a model and its catalogue entry; calls that run finish on it."""
        self._forget(model_id)
        self.catalogue.release(model_id)

    def deployment(self, model_id: str) -> Deployment:
        """Return a loaded model.

        Raises:
            ServiceError: `UNKNOWN_MODEL` or `MODEL_NOT_LOADED`.
        """
        self.catalogue.loaded(model_id)
        return self._deployments[model_id]

    @property
    def deployments(self) -> Mapping[str, Deployment]:
        """Every loaded model by its id, those that one principal alone may use included."""
        return MappingProxyType(self._deployments)

    async def adopt(self, hosted: HostedModel, owner: str) -> None:
        """Serve a model that is in memory already, for one principal.

        Its weights may change between passes, on the owner thread and in place.

        Raises:
            ServiceError: `MODEL_INVALID`, it cannot run on its example input.
        """
        model_id = hosted.spec.model_id
        deployment = await self.owner.run(lambda: self._make_deployment(hosted, 1, is_live=True))
        self._deployments[model_id] = deployment
        self.catalogue.adopt(hosted, owner)

    async def release(self, model_id: str) -> None:
        """Take back `adopt`, when the calls that use it have ended."""
        self.catalogue.release(model_id)
        deployment = self._deployments.pop(model_id, None)
        if deployment is not None:
            await deployment.pool.drain()

    def repeatable_version(self, model_id: str) -> str | None:
        """Return a version unique to the current weights of a model; None where replies are not cached.

        Raises:
            ServiceError: `UNKNOWN_MODEL` or `MODEL_NOT_LOADED`.
        """
        deployment = self.deployment(model_id)
        return deployment.version if deployment.is_repeatable else None

    def output_shapes(self, model_id: str) -> list[tuple[int, ...]]:
        """Return the shapes of the tensors that a model returns for its example input, batch first.

        Raises:
            ServiceError: `UNKNOWN_MODEL` or `MODEL_NOT_LOADED`.
        """
        calls = self.deployment(model_id).example.modules[""].calls
        leaves = (leaf for call in calls for leaf in call.outputs)
        return [tuple(leaf.shape) for leaf in leaves if leaf.shape is not None]

    def pools(self) -> Mapping[str, ReplicaPool]:
        """Return the replicas of every loaded model by its id, trainers included."""
        return {model_id: deployment.pool for model_id, deployment in self._deployments.items()}

    def recorded_counts(self) -> Mapping[str, int]:
        """Return how many passes of each loaded model were recorded for sizes that could not be predicted."""
        return {model_id: deployment.recorded_count for model_id, deployment in self._deployments.items()}

    async def serve(self, call: Call, reservation: Reservation) -> Extraction | KeptReply:
        """Check a call, receive its payloads, and run it, or return the reply of an earlier equal call.

        Args:
            call: The call.
            reservation: Proof of its admission; in the end it is for the bytes of the reply.

        Raises:
            ServiceError: Whatever is wrong with the request, or prevents the pass.
        """
        if call.plan.needs_processing:
            call = await self._processed(call, reservation)
        checked = await self._check(call, reservation)
        announced, reply_bytes, rows = call.announced_bytes, checked.byte_count, checked.rows
        reservation.check(announced + reply_bytes, rows)
        expected_s = self._expected_s(checked, call.deadline)
        reservation.check_seconds(expected_s)
        with call.phase("receive"):
            received = await call.receive(reservation)
        reservation.reserve(reply_bytes, rows)
        reservation.expect(expected_s)
        keeping = call.keeping
        key = None if keeping is None else await key_of(keeping.question, received)
        if key is not None and (kept := self.replies.get(key.question.owner, key.digest)) is not None:
            return kept
        payloads = call.processed or Payloads(received)
        if checked.has_more_than_inputs:
            payloads = call.processed or split_payloads(checked.plan, received, call.stored)
            await check_operands(checked.plan, payloads)
        with call.phase("prepare"):
            prepared = await self.prepare(checked, payloads, call.deadline, reservation)
        del received, payloads
        extraction = await self.extract(prepared, call.deadline)
        del prepared
        if key is not None and keeping is not None:
            await self._keep(key, checked, extraction, keeping.describe)
        reservation.computed()
        reservation.add(extraction.byte_count - reservation.byte_count)
        return extraction

    async def _processed(self, call: Call, reservation: Reservation) -> Call:
        """Receive a call and process its texts and sound, without which its shapes are not known."""
        with call.phase("receive"):
            received = await call.receive(reservation)
        payloads = split_payloads(call.plan, received, call.stored)
        plan, payloads = await self.process(call.plan, payloads, call.deadline, reservation)
        return replace(
            call, plan=plan, announced_bytes=0, receive=_nothing, key=None, keeping=None, processed=payloads
        )

    async def _check(self, call: Call, reservation: Reservation) -> CheckedPlan:
        """Return the checked plan of a call: that of an earlier equal one where it still holds."""
        plan, key = call.plan, call.key
        found = None if key is None else self.deployment(plan.model_id).checked(key, plan, self.limits)
        if found is not None:
            return found
        reservation.check(call.announced_bytes, row_count(plan.inputs))
        with call.phase("check"):
            checked = await self.checks.check(plan, call.deadline)
        if key is not None:
            checked.deployment.keep_checked(key, checked)
        return checked

    def _expected_s(self, checked: CheckedPlan, deadline: float | None) -> float:
        """Return about how long a pass will take, from earlier passes; 0 where there were too few.

        Raises:
            ServiceError: `SERVER_BUSY`, the call would be refused by the model's queue.
        """
        pool = checked.deployment.pool
        pool.check(deadline, checked.rows, checked.plan.execution.priority)
        return pool.throughput.seconds(checked.rows) if pool.throughput.is_known else 0.0

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
            if self.repeatable_version(plan.model_id) == version:
                self.replies.put(key.question.owner, key.digest, reply)

    def _run_later(self, work: Callable[[], None]) -> None:
        """Queue work for the owner thread that nobody waits for."""
        self.owner.submit(work).add_done_callback(lambda done: done.cancelled() or done.exception())

    def stop_processes(self) -> None:
        """Kill the processes that decode images and process inputs; what waits for them fails."""
        self.decoder.stop()
        self.processor.stop()

    async def process(
        self,
        plan: Plan,
        payloads: Payloads,
        deadline: float | None = None,
        reservation: Reservation | None = None,
    ) -> tuple[Plan, Payloads]:
        """Turn the texts and sound of a plan into arguments, in other processes.

        Args:
            plan: The plan; not yet checked against the model.
            payloads: Its payloads.
            deadline: A time of `time.monotonic()` in seconds, or None.
            reservation: Grows by the bytes of the arguments.

        Returns:
            The plan and payloads of the pass.

        Raises:
            ServiceError: As `Processor.process` does; `SERVER_BUSY`; `DEADLINE_EXCEEDED`.
        """
        hosted = self.catalogue.loaded(plan.model_id)

        async def processed(given: Plan | SourceInputs, own: Sequence[Payload]) -> Processed:
            if not given.unprocessed:
                return Processed(given.inputs, list(own), (), 0)
            return await self.processed(hosted, given.inputs, given.unprocessed, own, deadline, reservation)

        main = await processed(plan, payloads.inputs)
        pairs = zip(plan.sources, payloads.sources, strict=True)
        others = [await processed(source, own) for source, own in pairs]
        sources = tuple(
            SourceInputs(source.name, other.inputs)
            for source, other in zip(plan.sources, others, strict=True)
        )
        if has_spans(plan):
            plan = await asyncio.to_thread(with_token_rows, plan, plan.unprocessed, main.made)
        plan = replace(plan, inputs=main.inputs, unprocessed=(), processed=main.made, sources=sources)
        return plan, replace(payloads, inputs=main.payloads, sources=[other.payloads for other in others])

    async def processed(
        self,
        hosted: HostedModel,
        inputs: Sequence[ArgumentInput],
        unprocessed: Sequence[ProcessorInput],
        payloads: Sequence[Payload],
        deadline: float | None = None,
        reservation: Reservation | None = None,
    ) -> Processed:
        """Turn texts and sound into arguments of a model, in other processes.

        Args:
            hosted: The model.
            inputs: Its other inputs.
            unprocessed: The texts and sound.
            payloads: Those of all inputs.
            deadline: A time of `time.monotonic()` in seconds, or None.
            reservation: Grows by the bytes of the arguments.

        Raises:
            ServiceError: As `process`.
        """
        async with _until(deadline, "the inputs were processed"):
            made = await self.processor.process(hosted, inputs, unprocessed, payloads, self.limits)
        if reservation is not None:
            reservation.grow(made.byte_count)
        return made

    async def prepare(
        self,
        checked: CheckedPlan,
        payloads: Payloads,
        deadline: float | None = None,
        reservation: Reservation | None = None,
        *,
        is_alone: bool = False,
    ) -> Prepared:
        """Decode the images of a checked plan, in other processes.

        Args:
            checked: The checked plan.
            payloads: Its payloads.
            deadline: A time of `time.monotonic()` in seconds, or None.
            reservation: The reservation for the bytes of decoded and prepared images.
            is_alone: As for `Reservation.reserve`.

        Raises:
            ServiceError: `INVALID_IMAGE` or `IMAGE_TOO_LARGE`, naming the image's position; `SERVER_BUSY`;
                `DEADLINE_EXCEEDED`.
        """
        if not checked.has_images:
            return Prepared(checked, payloads, *checked.no_images)
        hosted, plan = checked.deployment.hosted, checked.plan
        room = _Room(reservation, is_alone)
        try:
            async with _until(deadline, "the images were decoded"):
                images = await self.decoded(hosted, plan.inputs, payloads.inputs, room.reserve)
                sources = zip(plan.sources, payloads.sources, strict=True)
                of_sources = [
                    await self.decoded(hosted, source.inputs, own, room.reserve) for source, own in sources
                ]
        except BaseException:
            room.give_back()
            raise
        return Prepared(checked, payloads, images, of_sources, room.byte_count)

    async def decoded(
        self,
        hosted: HostedModel,
        inputs: Sequence[ArgumentInput],
        payloads: Sequence[Payload],
        reserve: Callable[[int, int], None],
    ) -> list[list[Image.Image]]:
        """Decode the images of arguments; see `decode_images`."""
        if not has_images(inputs):
            return [[] for _ in inputs]
        return await decode_images(hosted, inputs, payloads, self.limits, self.decoder, reserve)

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
        if self.compiled.is_eager(checked):
            extraction = await self._extract_eagerly(prepared, deadline, statistics)
        else:
            extraction = await self._extract_compiled(prepared, deadline, statistics)
        if checked.plan.processed:
            extraction = replace(extraction, processed=checked.plan.processed)
        if extraction.copies is not None:  # without the lease: the next pass runs meanwhile
            await extraction.copies.arrived()
        return extraction

    async def _extract_compiled(
        self, prepared: Prepared, deadline: float | None, statistics: StreamStatistics | None
    ) -> Extraction:
        """Run one pass on a compiled variant, or eagerly until there is one."""
        checked = prepared.checked
        variant = self.compiled.find(checked)
        if variant is not None and variant.is_ready:
            with suppress(NotCompiledError):
                return await self.compiled.extract(variant, prepared, deadline, statistics)
        why = self.compiled.why_exact(checked, variant)
        extraction = await self._extract_eagerly(prepared, deadline, statistics)
        if variant is not None:
            self.compiled.was_asked(variant, prepared)
        if not why:
            return extraction
        asked = self.compiled.asked(checked)
        return replace(extraction, report=replace(extraction.report, asked=asked, reason=why))

    async def _extract_eagerly(
        self, prepared: Prepared, deadline: float | None, statistics: StreamStatistics | None
    ) -> Extraction:
        guard, checked = PassGuard(deadline), prepared.checked
        started = time.perf_counter()
        rows, priority = checked.rows, checked.plan.execution.priority
        async with checked.deployment.pool.lease(deadline, rows=rows, priority=priority) as replica:
            queue_s = time.perf_counter() - started

            def work() -> Extraction:
                resolved, result = run_plan(replica, prepared, guard)
                maps = statistics.add(result) if statistics else result.feature_maps
                return extraction_of(checked.plan, resolved, result, maps, queue_s, current().take())

            return await self.run(work, guard, deadline)

    async def run(self, work: Callable[[], Result], guard: PassGuard, deadline: float | None) -> Result:
        """Run work that checks the guard on the owner thread; cancellation and the deadline stop it."""
        loop = asyncio.get_running_loop()
        left_s = _left_s(deadline)
        timer = None if left_s is None else loop.call_later(left_s, guard.expire)
        try:
            return await self.owner.run(work, on_cancel=guard.cancel)
        finally:
            if timer is not None:
                timer.cancel()

    def _entry_to_load(self, model_id: str) -> Entry:
        entry = self.catalogue.get(model_id)
        if entry.owner is not None:
            raise guest_refused(model_id)
        return entry

    def _make_deployment(self, hosted: HostedModel, replicas: int, *, is_live: bool = False) -> Deployment:
        deployment = make_deployment(hosted, replicas, self.limits.max_queue, is_live=is_live)
        deployment.max_pass_bytes = lambda: self.limits.max_pass_bytes
        return deployment

    def _forget(self, model_id: str) -> Deployment | None:
        deployment = self._deployments.pop(model_id, None)
        if deployment is not None:
            self.replies.drop(deployment.version)
            self.compiled.forget(deployment)
        return deployment


def _left_s(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


@asynccontextmanager
async def _until(deadline: float | None, what_happened: str) -> AsyncIterator[None]:
    """Stop what is awaited inside at the deadline, with `DEADLINE_EXCEEDED`."""
    try:
        async with asyncio.timeout(_left_s(deadline)):
            yield
    except TimeoutError:
        raise ServiceError(
            ErrorReason.DEADLINE_EXCEEDED, f"the deadline passed while {what_happened}"
        ) from None


async def _nothing(_: Reservation) -> list[Payload]:
    """Receive a call whose payloads have come."""
    return []


def _load_failure(model_id: str, error: Exception) -> ServiceError:
    """Return the error of a model whose code fails in an unforeseen way."""
    what = f"{type(error).__name__}: {first_line(error)}"
    return ServiceError(ErrorReason.MODEL_INVALID, f"model '{model_id}' cannot be loaded: {what}")
