"""Compiled variants of frequent passes: built in another process, compared with eager, then used.

A call never waits for a build. It runs eagerly until the compiled variant of its values, row shape and
numerics has been built in another process and has kept its promise on a real batch.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from trocar_server.config import EngineConfig, Limits
from trocar_server.engine.compiled.backends.availability import available_numerics
from trocar_server.engine.compiled.backends.builds import build_apart
from trocar_server.engine.compiled.backends.recipe import ArgumentSpec, Recipe, is_compilable, is_recordable
from trocar_server.engine.compiled.compiled_executor import CompiledExecutor
from trocar_server.engine.compiled.group_sizes import GroupSizes
from trocar_server.engine.compiled.requested_recipe import recipe_of, why_not
from trocar_server.engine.compiled.variant import (
    State,
    Variant,
    argument_specs,
    example_plan,
    is_one_forward,
    plan_signature,
    rows_of,
)
from trocar_server.engine.compiled.variant_building import Build, Identify, VariantBuilder
from trocar_server.engine.compiled.variant_store import VariantStore
from trocar_server.engine.host.checked_plan import CheckedPlan
from trocar_server.engine.host.deployment import Deployment
from trocar_server.engine.request.numerics import Numerics
from trocar_server.engine.request.plan import Execution, Plan, row_count
from trocar_server.engine.run.bound_call import Prepared
from trocar_server.engine.run.extraction import Extraction
from trocar_server.engine.run.resolving import NO_SOURCES
from trocar_server.engine.run.runner import DeclinedError, Outcome, PassCall, run_together
from trocar_server.engine.run.stream_statistics import StreamStatistics
from trocar_server.engine.schedule.device import DeviceThread, device_user
from trocar_server.engine.schedule.merge_group import merge_group
from trocar_server.engine.schedule.merging import MergingQueue
from trocar_server.errors import ServiceError, first_line
from trocar_server.models import current_flow
from trocar_server.models.spec import WarmVariant
from trocar_server.surgery import PassGuard
from trocar_server.tasks import begin

_KEYS_KEPT = 512
_MOST_FAILURES = 3
_CHECK_AGAIN_AFTER = 1024
"""Groups after which a variant is compared with eager again, on the next batch."""

_Key = tuple[object, ...]


class CompiledVariants:
    """The compiled variants of an engine's models. Every method belongs to one event loop.

    Args:
        owner: The thread that calls torch.
        config: When to build, and how many.
        limits: Returns the current limits of a call.
        data_dir: Folder of the weights.
        kept_dir: Folder of variants that are kept for the next process; None keeps none.
        build: Builds in another process.
        log: Logger; one line for each variant used or rejected; structlog's logger `trocar` when None.
        identify: Returns which model a deployment serves; needed where variants are kept.
    """

    def __init__(
        self,
        owner: DeviceThread,
        config: EngineConfig,
        limits: Callable[[], Limits],
        data_dir: Path,
        kept_dir: Path | None = None,
        build: Build = build_apart,
        log: Any = None,
        identify: Identify | None = None,
    ) -> None:
        self._log = log = log or structlog.get_logger("trocar")
        self._owner = owner
        self._config = config
        self._limits = limits
        self.store = None
        if kept_dir is not None and config.kept_variants_bytes and owner.device.type == "cpu":
            self.store = VariantStore(kept_dir, config.kept_variants_bytes, log)
        self.builder = VariantBuilder(owner, config, data_dir, build, log, self.store, identify)
        self.evicted_count = 0
        self._by_key: OrderedDict[_Key, Variant | None] = OrderedDict()
        self._variants: OrderedDict[_Key, Variant] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()

    def is_eager(self, checked: CheckedPlan) -> bool:
        """Whether a checked plan can only run eagerly, and asks for nothing else."""
        return self.asked(checked) is Numerics.EXACT and not self.builder.keeps_bits(checked.deployment)

    def find(self, checked: CheckedPlan) -> Variant | None:
        """Return the variant for a checked plan, ready or not; None where only eager is possible."""
        deployment, plan, numerics = checked.deployment, checked.plan, self.asked(checked)
        if deployment.is_dropped or not self._config.compile_after or not is_one_forward(plan):
            return None
        if deployment.hosted.pristine.is_renewed:
            return None
        if plan.edits or deployment.may_change:
            if not self.builder.keeps_bits(deployment):
                return None
            numerics = Numerics.EXACT  # replayed as they are, on the weights as they are: never converted
        arguments = argument_specs(deployment, plan)
        if arguments is None:
            return None
        key = (id(deployment), plan.taps, plan.edits, plan.negative_zeros, arguments, numerics)
        if key not in self._by_key:
            if not _is_recorded(deployment, plan):  # images: they are decoded later
                return None
            self._by_key[key] = self._make(deployment, plan, arguments, numerics)
            if len(self._by_key) > _KEYS_KEPT:
                self._by_key.popitem(last=False)
        return self._by_key[key]

    def asked(self, checked: CheckedPlan) -> Numerics:
        """Return the loosest numerics that a plan's caller accepts."""
        numerics = checked.plan.execution.numerics
        return numerics or Numerics(checked.deployment.hosted.spec.numerics or self._config.numerics)

    def why_exact(self, checked: CheckedPlan, variant: Variant | None) -> str:
        """Return why a plan that accepts looser numerics runs eagerly; empty where it accepts none."""
        deployment, plan, asked = checked.deployment, checked.plan, self.asked(checked)
        if asked is Numerics.EXACT:
            return ""
        if plan.edits or not is_one_forward(plan):
            return "passes with edits, gradients, sources or start_at always run exactly"
        if deployment.hosted.pristine.is_renewed:
            return "this model keeps state or writes to its own tensors, so its passes always run exactly"
        if deployment.may_change:
            return "the weights of this model may change, so its passes always run exactly"
        if variant is None:
            lacking = self.availability(deployment)[asked] if not self._config.compile_after else None
            if not lacking and argument_specs(deployment, plan) and not _is_recorded(deployment, plan):
                return "no pass with a batch of such shapes has run yet"
            return lacking or "a pass with such inputs or taps cannot be compiled"
        if variant.state is State.COUNTING:
            wait = f"a compiled pass is built after {self._config.compile_after} such calls"
        elif variant.state is State.REFUSED:
            wait = (
                f"no compiled pass qualified ({'; '.join(variant.problems) or 'no backend could be tried'})"
            )
        elif variant.is_ready:
            wait = (
                "the compiled pass does not fit this batch or its numbers (NaN, infinities, above 1e6), has "
                "too little memory for it, or failed on it"
            )
        else:
            wait = "a compiled pass is being built and tested"
        return "; ".join(filter(None, (wait, self.availability(deployment)[asked])))

    def availability(self, deployment: Deployment) -> Mapping[Numerics, str | None]:
        """Return, for each numerics, None, or why passes of a model that ask for it are likely exact."""
        config, compiles = self._config, bool(self._config.compile_after)
        return available_numerics(deployment.hosted.device, compiles=compiles, uses_openvino=config.openvino)

    async def extract(
        self,
        variant: Variant,
        prepared: Prepared,
        deadline: float | None,
        statistics: StreamStatistics | None,
    ) -> Extraction:
        """Run one call on a ready variant, merged with others where that is allowed and faster.

        Raises:
            DeclinedError: It has to run eagerly instead.
            ServiceError: The call's own error.
        """
        self._variants.move_to_end(_key(variant))
        guard = PassGuard(deadline)
        call = PassCall(prepared, guard, time.perf_counter(), statistics, current_flow())
        plan = prepared.plan
        try:
            execution = plan.execution
            setting, mixed = variant.deployment.hosted.spec.merge, variant.built.mixed_rows
            group = merge_group(setting, execution, variant.numerics, mixed)
            result = await variant.queue.submit(
                call, rows_of(plan), group=group, priority=execution.priority, deadline=deadline
            )
            checked = prepared.checked
            is_exact = variant.numerics is Numerics.EXACT
            reason = self.why_exact(checked, variant) if is_exact else _why(variant)
            return replace(result, report=replace(result.report, asked=self.asked(checked), reason=reason))
        except asyncio.CancelledError:
            guard.cancel()
            raise

    def was_asked(self, variant: Variant, prepared: Prepared, failure: str = "") -> None:
        """Count a call that ran eagerly: build or try its variant when due, or reject one that keeps failing.

        Args:
            variant: The variant.
            prepared: The call.
            failure: The error of the compiled pass, if it failed on this very call before.
        """
        variant.asked_count += 1
        if failure and variant.is_ready:
            variant.failed_count += 1
            if variant.failed_count >= _MOST_FAILURES:
                self.builder.give_up(variant, failure)
        elif variant.state is State.COUNTING and variant.asked_count >= self._config.compile_after:
            variant.state = State.BUILDING
            begin(self.builder.build(variant), self._tasks)
        elif variant.state is State.CANDIDATE and self._fits(variant, prepared.checked):
            variant.state = State.TRYING
            begin(self.builder.attempt(variant, prepared), self._tasks)

    def clean(self) -> None:
        """Remove what killed processes left half-built."""
        if self.store is not None:
            self.store.clean()

    def prepare(self, deployment: Deployment) -> "asyncio.Task[None]":
        """Start to restore a model's kept variants and to build its warm ones; return the task.

        It raises nothing.
        """
        return begin(self._prepare(deployment), self._tasks)

    async def _prepare(self, deployment: Deployment) -> None:
        await self._restore(deployment)
        for wanted in deployment.hosted.spec.warm_variants:
            if not deployment.is_dropped:
                await self._warm(deployment, wanted)

    async def _warm(self, deployment: Deployment, wanted: WarmVariant) -> None:
        """Build a variant, unless it was restored; log the reason if none results."""
        execution = Execution(Numerics(wanted.numerics))
        try:
            checked = CheckedPlan(
                example_plan(deployment, wanted.taps, execution), deployment, self._limits()
            )
            signature = plan_signature(deployment, checked.plan)
            await self._owner.run(lambda: deployment.record(signature))
            variant = self.find(checked)
            if variant is not None and variant.state is State.COUNTING:
                variant.state = State.BUILDING
                await self.builder.warm(variant)
            problem = "" if variant is not None and variant.is_ready else self.why_exact(checked, variant)
        except Exception as error:  # noqa: BLE001 - a reply that is too large, or the model raises anything
            problem = first_line(error)
        if problem:
            facts = {"model_id": deployment.hosted.spec.model_id, "values": list(wanted.taps)}
            self._log.warning("no warm variant", **facts, asked=wanted.numerics, problem=problem)

    async def _restore(self, deployment: Deployment) -> None:
        if not self._config.compile_after:
            return
        result = await self.builder.find_kept(deployment)
        for kept in reversed(result[: self._config.max_compiled]):  # the last used one is dropped last
            if deployment.is_dropped:
                return
            try:
                variant = self._new_variant(deployment, kept.record.recipe, kept.record.asked)
            except ValueError:  # a dtype of another version of torch
                continue
            if len(self._variants) >= self._config.max_compiled or _key(variant) in self._variants:
                continue
            variant.state = State.BUILDING
            self._variants[_key(variant)] = variant
            await self.builder.restore(variant, kept)

    def forget(self, deployment: Deployment) -> "asyncio.Task[None]":
        """Drop the variants of a model that is unloaded; the task ends when none of them runs a call.

        Calls that wait for one run eagerly.
        """
        dropped = [variant for variant in self._variants.values() if variant.deployment is deployment]
        for variant in dropped:
            self._drop(variant)
        # Ids of objects are reused: no entry may remain under this one.
        for key in [key for key in self._by_key if key[0] == id(deployment)]:
            del self._by_key[key]
        return begin(_drained(dropped), self._tasks)

    async def settled(self) -> None:
        """Wait until no background task is running."""
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def stop(self) -> None:
        """Cancel background tasks, and drop every variant."""
        for task in self._tasks:
            task.cancel()
        await self.settled()
        for variant in list(self._variants.values()):
            self._drop(variant)

    def variants(self) -> Sequence[Variant]:
        """Return every variant, for reports."""
        return list(self._variants.values())

    def queues(self, deployment: Deployment) -> Sequence[MergingQueue[PassCall, Extraction]]:
        """Return the queues of a model's variants, for reports."""
        return [variant.queue for variant in self._variants.values() if variant.deployment is deployment]

    def _make(
        self, deployment: Deployment, plan: Plan, arguments: tuple[ArgumentSpec, ...], numerics: Numerics
    ) -> Variant | None:
        """Find or create the variant of a plan; None where it cannot be compiled."""
        recipe = self._recipe(deployment, plan, arguments)
        if recipe is None or not is_compilable(recipe.targets) or not is_recordable(recipe):
            return None
        variant = self._new_variant(deployment, recipe, numerics)
        variant = self._variants.setdefault(_key(variant), variant)
        if len(self._variants) > self._config.max_compiled:
            self._drop(next(iter(self._variants.values())))
            self.evicted_count += 1
        return variant

    def _recipe(
        self, deployment: Deployment, plan: Plan, arguments: tuple[ArgumentSpec, ...]
    ) -> Recipe | None:
        """Return what a plan asks for with its own batch size; None where its data may decide that."""
        signature, limit = plan_signature(deployment, plan), self._limits().max_reply_bytes
        recording = deployment.recorded(signature)
        if recording is None or not recording.is_symbolic:
            return None
        try:
            return recipe_of(
                plan, deployment.resolve(plan, signature, recording, limit, NO_SOURCES), arguments
            )
        except ServiceError:  # the images of the request may have other sizes
            return None

    def _fits(self, variant: Variant, checked: CheckedPlan) -> bool:
        """Whether a variant may be tried on a plan's batch. See Note: [One recipe, many batch sizes]."""
        arguments = argument_specs(checked.deployment, checked.plan)
        if arguments is None:
            return False
        return self._recipe(checked.deployment, checked.plan, arguments) == variant.recipe

    def _new_variant(self, deployment: Deployment, recipe: Recipe, numerics: Numerics) -> Variant:
        sizes = GroupSizes(self._config.merge_max_rows, self._config.merge_max_s)

        async def run(calls: Sequence[PassCall]) -> Sequence[Outcome]:
            return await self._run(variant, calls)

        queue = MergingQueue(run, sizes.limit, self._limits().max_queue)
        variant = Variant(deployment, recipe, numerics, queue, sizes)
        return variant

    async def _run(self, variant: Variant, calls: Sequence[PassCall]) -> Sequence[Outcome]:
        runner = variant.runner
        if runner is None or not variant.is_ready:
            return [DeclinedError() for _ in calls]
        started = time.perf_counter()
        device_user.set(variant.deployment.hosted.spec.model_id)
        executor, refusal = CompiledExecutor(runner), partial(why_not, variant.recipe)
        together = partial(run_together, executor, calls, refusal, self._limits().max_pass_bytes)
        outcomes = await self._owner.run(together, shares=_shares(calls))
        ran = [c for c, result in zip(calls, outcomes, strict=True) if isinstance(result, Extraction)]
        if not ran:
            return outcomes
        variant.failed_count = 0
        variant.group_count += 1
        if len(ran) == len(calls):
            rows = sum(rows_of(call.prepared.plan) for call in calls)
            variant.sizes.record(rows, time.perf_counter() - started)
        if variant.group_count % _CHECK_AGAIN_AFTER == 0 or not variant.is_proven:
            variant.is_proven = True
            begin(self.builder.check_again(variant, ran[0].prepared), self._tasks)
        return outcomes

    def _drop(self, variant: Variant) -> None:
        variant.give_up()
        del self._variants[_key(variant)]
        for key in [key for key, other in self._by_key.items() if other is variant]:
            del self._by_key[key]


async def _drained(variants: Sequence[Variant]) -> None:
    for variant in variants:
        await variant.queue.drained()


def _why(variant: Variant) -> str:
    """Return why a variant runs in stricter numerics than allowed; empty where it does not."""
    if variant.runner is None or variant.runner.numerics is variant.numerics:
        return ""
    return f"{variant.numerics} exceeds its tolerance or is no faster ({'; '.join(variant.problems)})"


def _is_recorded(deployment: Deployment, plan: Plan) -> bool:
    """Whether a pass on a batch of a plan's shapes was recorded; for images not before one ran."""
    return deployment.recorded(plan_signature(deployment, plan)) is not None


def _shares(calls: Sequence[PassCall]) -> dict[str, float]:
    """Return each flow's share of a group's rows."""
    rows = [row_count(call.prepared.plan.inputs) for call in calls]
    shares: dict[str, float] = {}
    for call, count in zip(calls, rows, strict=True):
        shares[call.flow] = shares.get(call.flow, 0.0) + count / sum(rows)
    return shares


def _key(variant: Variant) -> _Key:
    return id(variant.deployment), variant.recipe, variant.numerics
