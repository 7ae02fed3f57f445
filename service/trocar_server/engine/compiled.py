"""Compiled forms of passes that are asked for often: built apart, tried against eager, then used.

A call never waits for any of it. It runs eagerly until the compiled form of its values, row shape and
numerics has been built in another process and has kept its promise on a real batch.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from trocar_server.config import EngineConfig, Limits
from trocar_server.engine.compiled_pass import CompiledCall, NotCompiledError, run_group
from trocar_server.engine.device import DeviceThread
from trocar_server.engine.form_building import Build, FormBuilder
from trocar_server.engine.forms import Form, State, argument_forms, assumed_form, looks_only, rows_of
from trocar_server.engine.group_sizes import GroupSizes
from trocar_server.engine.hosting import Host
from trocar_server.engine.merging import MergingQueue
from trocar_server.engine.outcome import Extraction
from trocar_server.engine.plan import Plan
from trocar_server.engine.running import RunningStatistics
from trocar_server.engine.work import NO_SOURCES, Prepared
from trocar_server.engines import Numerics
from trocar_server.engines.builds import build_apart
from trocar_server.engines.recipe import ArgumentForm, Recipe, is_compilable
from trocar_server.models import current_flow
from trocar_server.surgery import PassGuard

_KEYS_KEPT = 512
_CHECK_AGAIN_AFTER = 1024
"""Groups after which a form is compared with eager again, on the batch that happens to come."""

_Key = tuple[object, ...]


class CompiledForms:
    """The compiled forms of an engine's models. Every method belongs to one event loop.

    Args:
        owner: The thread that calls torch.
        config: When to build, and how many.
        limits: What a call may not exceed.
        data_dir: Where weights are kept.
        build: Builds in another process.
        log: Takes a line for each form that is used or given up; structlog's logger `trocar` when None.
    """

    def __init__(
        self,
        owner: DeviceThread,
        config: EngineConfig,
        limits: Limits,
        data_dir: Path,
        build: Build = build_apart,
        log: Any = None,
    ) -> None:
        self._owner = owner
        self._config = config
        self._limits = limits
        self.builder = FormBuilder(owner, config, data_dir, build, log or structlog.get_logger("trocar"))
        self.evicted_count = 0
        self._by_key: OrderedDict[_Key, Form | None] = OrderedDict()
        self._forms: OrderedDict[_Key, Form] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def find(self, host: Host, plan: Plan) -> Form | None:
        """Return the form that a checked plan may be run on, ready or not; None where only eager will do."""
        numerics = plan.execution.numerics or Numerics(host.hosted.spec.numerics or self._config.numerics)
        if numerics is Numerics.EXACT and not self.builder.keeps_bits(host):
            return None
        if not self._config.compile_after or not looks_only(plan):
            return None
        arguments = argument_forms(host, plan)
        if arguments is None:
            return None
        key = (id(host), plan.taps, arguments, numerics)
        if key not in self._by_key:
            self._by_key[key] = self._make(host, plan, arguments, numerics)
            if len(self._by_key) > _KEYS_KEPT:
                self._by_key.popitem(last=False)
        return self._by_key[key]

    async def extract(
        self, form: Form, prepared: Prepared, deadline: float | None, running: RunningStatistics | None
    ) -> Extraction:
        """Run one call on a form that is ready, together with others where that pays.

        Raises:
            NotCompiledError: It has to run eagerly after all.
            ServiceError: What is wrong with the call.
        """
        self._forms.move_to_end(_key(form))
        guard = PassGuard(deadline)
        call = CompiledCall(prepared, guard, running, time.perf_counter(), current_flow())
        plan = prepared.plan
        try:
            execution = plan.execution
            # Another batch size has other last bits.
            may_merge = execution.merge and form.numerics is not Numerics.EXACT
            extraction = await form.queue.submit(
                call, rows_of(plan), may_merge=may_merge, priority=execution.priority
            )
            if extraction.copies is not None:
                await extraction.copies.arrived()
            return extraction
        except asyncio.CancelledError:
            guard.cancel()
            raise

    def was_asked(self, form: Form, prepared: Prepared) -> None:
        """Count a call that ran eagerly; build or try its form where it is time to."""
        form.asked_count += 1
        if form.state is State.COUNTING and form.asked_count >= self._config.compile_after:
            form.state = State.BUILDING
            self._start(self.builder.build(form))
        elif form.state is State.CANDIDATE:
            form.state = State.TRYING
            self._start(self.builder.attempt(form, prepared))

    def forget(self, host: Host) -> None:
        """Drop the forms of a model that is unloaded."""
        for form in [form for form in self._forms.values() if form.host is host]:
            self._drop(form)
        # Ids of objects are given out again: nothing may be left under this one.
        for key in [key for key in self._by_key if key[0] == id(host)]:
            del self._by_key[key]

    async def settled(self) -> None:
        """Wait until nothing is under way in the background."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def stop(self) -> None:
        """End what is under way in the background, and drop every form."""
        for task in self._tasks:
            task.cancel()
        await self.settled()
        for form in list(self._forms.values()):
            self._drop(form)

    def forms(self) -> Sequence[Form]:
        """Return every form, for whoever reports about them."""
        return list(self._forms.values())

    def _make(
        self, host: Host, plan: Plan, arguments: tuple[ArgumentForm, ...], numerics: Numerics
    ) -> Form | None:
        """Find or make the form of a plan; None where it cannot be compiled."""
        signature = assumed_form(host, plan)
        recording = host.recorded(signature)
        if recording is None or not recording.is_symbolic:
            return None
        resolved = host.resolve(plan, signature, recording, self._limits.max_reply_bytes, NO_SOURCES)
        targets = {entry.target.name: entry.target for entry in resolved.targets}
        if not is_compilable(list(targets.values())):
            return None
        form = self._new_form(host, Recipe(arguments, tuple(targets.values())), numerics)
        form = self._forms.setdefault(_key(form), form)
        if len(self._forms) > self._config.max_compiled:
            self._drop(next(iter(self._forms.values())))
            self.evicted_count += 1
        return form

    def _new_form(self, host: Host, recipe: Recipe, numerics: Numerics) -> Form:
        sizes = GroupSizes(self._config.merge_max_rows, self._config.merge_max_s)

        async def run(calls: Sequence[CompiledCall]) -> Sequence[Extraction | BaseException]:
            return await self._run(form, calls)

        queue = MergingQueue(run, sizes.limit, self._limits.max_queue)
        form = Form(host, recipe, numerics, queue, sizes)
        return form

    async def _run(self, form: Form, calls: Sequence[CompiledCall]) -> Sequence[Extraction | BaseException]:
        runner = form.runner
        if runner is None or not form.is_ready:
            return [NotCompiledError() for _ in calls]
        started = time.perf_counter()
        try:
            group = partial(run_group, form.host, runner, calls, self._limits)
            outcomes = await self._owner.run(group, shares=_shares(calls))
        except Exception as error:  # noqa: BLE001 - whatever an engine raises
            self.builder.give_up(form, f"it failed with {type(error).__name__}: {error}"[:300])
            return [NotCompiledError() for _ in calls]
        form.sizes.record(sum(rows_of(call.prepared.plan) for call in calls), time.perf_counter() - started)
        form.group_count += 1
        if form.group_count % _CHECK_AGAIN_AFTER == 0:
            self._start(self.builder.check_again(form, calls[0].prepared))
        return outcomes

    def _drop(self, form: Form) -> None:
        form.give_up()
        del self._forms[_key(form)]
        for key in [key for key, other in self._by_key.items() if other is form]:
            del self._by_key[key]

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _shares(calls: Sequence[CompiledCall]) -> dict[str, float]:
    """Return whose rows a group's are."""
    rows = [max(rows_of(call.prepared.plan), 1) for call in calls]
    shares: dict[str, float] = {}
    for call, count in zip(calls, rows, strict=True):
        shares[call.flow] = shares.get(call.flow, 0.0) + count / sum(rows)
    return shares


def _key(form: Form) -> _Key:
    return id(form.host), form.recipe, form.numerics
