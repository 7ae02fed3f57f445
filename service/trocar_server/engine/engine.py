"""The engine: loads models and runs plans, for callers on one event loop."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from PIL import Image

from trocar_server.config import EngineConfig, Limits
from trocar_server.engine.admission import Admission, with_budgets
from trocar_server.engine.checks import Checks
from trocar_server.engine.compiled import CompiledForms
from trocar_server.engine.compiled_pass import NotCompiledError
from trocar_server.engine.device import DeviceThread
from trocar_server.engine.forms import rows_of
from trocar_server.engine.hosting import Host, make_host
from trocar_server.engine.inputs import decode_images
from trocar_server.engine.lease import ReplicaPool
from trocar_server.engine.memory import memory_limit
from trocar_server.engine.outcome import ExecutionReport, Extraction, stop_depth, there
from trocar_server.engine.plan import (
    ArgumentInput,
    ImageInput,
    Payload,
    Payloads,
    Plan,
    row_count,
)
from trocar_server.engine.repeatable import is_repeatable
from trocar_server.engine.reply_cache import ReplyCache
from trocar_server.engine.running import RunningStatistics
from trocar_server.engine.transfer import current
from trocar_server.engine.work import Prepared, run_plan
from trocar_server.errors import ServiceError
from trocar_server.models import (
    Catalogue,
    Entry,
    HostedModel,
    ModelState,
    guest_refused,
    load_model,
    prefetch_weights,
)
from trocar_server.surgery import PassGuard

Result = TypeVar("Result")


class Engine:
    """Runs plans on the models of a catalogue. Every method belongs to one event loop.

    Args:
        catalogue: What can be loaded.
        owner: The thread that calls torch, started.
        limits: What a call may not exceed.
        data_dir: Where weights are kept.
        replica_counts: Replicas by model id; 1 where absent.
        config: How passes are run that only look.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        owner: DeviceThread,
        limits: Limits,
        data_dir: Path,
        replica_counts: dict[str, int] | None = None,
        config: EngineConfig = EngineConfig(),  # noqa: B008 - frozen
    ) -> None:
        self.catalogue = catalogue
        self.owner = owner
        limit = memory_limit(limits.max_pass_bytes, owner.device)
        self.limits = with_budgets(limits.model_copy(update={"max_pass_bytes": limit}))
        self.admission = Admission(self.limits)
        self.checks = Checks(self._host, lambda: self.limits, self.run)
        self._data_dir = data_dir
        self._replica_counts = replica_counts or {}
        self._hosts: dict[str, Host] = {}
        self._loading: dict[str, asyncio.Lock] = {}
        self.replies = ReplyCache(limits.feature_cache_bytes)
        self.compiled = CompiledForms(owner, config, self.limits, data_dir)

    async def load(self, model_id: str) -> Entry:
        """Load a model of the catalogue; nothing happens when it is loaded.

        Raises:
            ServiceError: `UNKNOWN_MODEL` and whatever makes loading impossible.
        """
        entry = self._entry_to_load(model_id)
        async with self._loading.setdefault(model_id, asyncio.Lock()):
            if model_id in self._hosts:
                return entry
            entry.state, entry.error_message = ModelState.LOADING, ""
            try:
                # A download calls no torch operator and must not block the owner thread.
                await asyncio.to_thread(prefetch_weights, entry.spec, self._data_dir)
                self._hosts[model_id] = await self.owner.run(lambda: self._make_host(entry))
            except ServiceError as error:
                entry.state, entry.error_message = ModelState.FAILED, error.message
                raise
            except BaseException:
                entry.state = ModelState.UNLOADED
                raise
            entry.hosted, entry.state = self._hosts[model_id].hosted, ModelState.LOADED
            return entry

    async def unload(self, model_id: str) -> Entry:
        """Drop a model from memory when its calls have ended; its catalogue entry stays."""
        entry = self._entry_to_load(model_id)
        async with self._loading.setdefault(model_id, asyncio.Lock()):
            host = self._hosts.pop(model_id, None)
            if host is not None:
                entry.hosted, entry.state = None, ModelState.UNLOADED
                self.replies.drop(host.version)
                self.compiled.forget(host)
                await host.pool.drain()
            return entry

    async def adopt(self, hosted: HostedModel, owner: str) -> None:
        """Serve a model that is in memory already, for one principal.

        Its weights may change between passes, on the owner thread and in place.

        Raises:
            ServiceError: `MODEL_INVALID`, it cannot run on its example input.
        """
        model_id = hosted.spec.model_id
        host = await self.owner.run(lambda: make_host(hosted, 1, self.limits.max_queue, is_live=True))
        self._hosts[model_id] = host
        self.catalogue.adopt(hosted, owner)

    async def release(self, model_id: str) -> None:
        """Take back `adopt`, when the calls that use it have ended."""
        self.catalogue.release(model_id)
        host = self._hosts.pop(model_id, None)
        if host is not None:
            await host.pool.drain()

    def repeatable_version(self, model_id: str) -> str | None:
        """Return what tells the present weights of a model from all others; None where replies are not kept.

        Raises:
            ServiceError: `UNKNOWN_MODEL` or `MODEL_NOT_LOADED`.
        """
        host = self._host(model_id)
        return host.version if host.is_repeatable else None

    def pools(self) -> Mapping[str, ReplicaPool]:
        """Return the replicas of every loaded model, by its id; those of trainers among them."""
        return {model_id: host.pool for model_id, host in self._hosts.items()}

    def expected_s(self, plan: Plan, deadline: float | None = None) -> float:
        """Return about how long a pass will take, from those before it; 0 where too few were.

        Raises:
            ServiceError: `SERVER_BUSY`, the call would be refused a place in the model's line.
        """
        pool, rows = self._host(plan.model_id).pool, row_count(plan.inputs)
        pool.check(deadline, rows, plan.execution.priority)
        return pool.pace.seconds(rows) if pool.pace.is_known else 0.0

    async def prepare(self, plan: Plan, payloads: Payloads) -> Prepared:
        """Decode the images of a plan that was checked, on another thread than torch's.

        Args:
            plan: What to do.
            payloads: The bytes that came with it.

        Raises:
            ServiceError: `INVALID_IMAGE` or `IMAGE_TOO_LARGE`, naming the image's position.
        """
        images = await self._decoded(plan.inputs, payloads.inputs)
        sources = zip(plan.sources, payloads.sources, strict=True)
        of_sources = [await self._decoded(source.inputs, own) for source, own in sources]
        return Prepared(plan, payloads, images, of_sources)

    async def _decoded(
        self, inputs: Sequence[ArgumentInput], payloads: Sequence[Payload]
    ) -> list[list[Image.Image]]:
        if not any(isinstance(entry, ImageInput) for entry in inputs):
            return [[] for _ in inputs]
        limits = self.limits
        return await asyncio.to_thread(
            decode_images, inputs, payloads, limits.max_image_pixels, limits.max_request_bytes
        )

    async def extract(
        self, prepared: Prepared, deadline: float | None = None, running: RunningStatistics | None = None
    ) -> Extraction:
        """Run one pass.

        Args:
            prepared: What to do.
            deadline: A time of `time.monotonic()` in seconds, or None.
            running: Takes in the statistics, all or none, which the outcome is then without.
        """
        host = self._host(prepared.plan.model_id)
        form = self.compiled.find(host, prepared.plan)
        if form is not None and form.is_ready:
            with suppress(NotCompiledError):
                return await self.compiled.extract(form, prepared, deadline, running)
        extraction = await self._extract_eagerly(host, prepared, deadline, running)
        if form is not None:
            self.compiled.was_asked(form, prepared)
        return extraction

    async def _extract_eagerly(
        self,
        host: Host,
        prepared: Prepared,
        deadline: float | None,
        running: RunningStatistics | None,
    ) -> Extraction:
        guard = PassGuard(deadline)
        started = time.perf_counter()
        plan = prepared.plan
        rows, priority = row_count(plan.inputs), plan.execution.priority
        async with host.pool.lease(deadline, rows=rows, priority=priority) as replica:
            queue_s = time.perf_counter() - started

            def work() -> Extraction:
                resolved, result = run_plan(host, replica, prepared, guard, self.limits)
                maps = running.add(result) if running else result.feature_maps
                return Extraction(
                    maps,
                    there(resolved, result),
                    result.stopped_at,
                    queue_s,
                    result.compute_s,
                    resolved.surgery.expansions,
                    result.objective,
                    ExecutionReport(row_count=rows_of(prepared.plan)),
                    depth=stop_depth(prepared.plan, resolved, result),
                    has_drawn=result.has_drawn,
                    copies=current().take(),
                )

            extraction = await self.run(work, guard, deadline)
        if extraction.copies is not None:  # not under the lease: the next pass runs meanwhile
            await extraction.copies.arrived()
        return extraction

    async def run(self, work: Callable[[], Result], guard: PassGuard, deadline: float | None) -> Result:
        """Run work that asks the guard on the owner thread; a cancelled task and the deadline stop it."""
        loop = asyncio.get_running_loop()
        wait_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        timer = None if wait_s is None else loop.call_later(wait_s, guard.expire)
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

    def _make_host(self, entry: Entry) -> Host:
        hosted = load_model(entry.spec, self.owner.device, self._data_dir)
        count = self._replica_counts.get(entry.spec.model_id, 1)
        host = make_host(hosted, count, self.limits.max_queue)
        host.is_repeatable = self.replies.max_bytes > 0 and is_repeatable(hosted)
        return host

    def _host(self, model_id: str) -> Host:
        self.catalogue.loaded(model_id)
        return self._hosts[model_id]
