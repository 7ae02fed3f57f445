"""Variant building: background builds, trials and rejection of compiled variants."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trocar_server.config import EngineConfig
from trocar_server.engine.compiled.backends.build_worker import Built, Job
from trocar_server.engine.compiled.backends.candidates import Runner, candidates, has_openvino
from trocar_server.engine.compiled.backends.graphs import GraphApi, graphs_of
from trocar_server.engine.compiled.backends.variant_folder import VariantFolder
from trocar_server.engine.compiled.variant import State, Variant
from trocar_server.engine.compiled.variant_trial import problem_of
from trocar_server.engine.host.deployment import Deployment
from trocar_server.engine.request.numerics import Numerics
from trocar_server.engine.run.run_plan import Prepared
from trocar_server.engine.schedule.device import DeviceThread
from trocar_server.errors import first_line
from trocar_server.models import make_replica

Build = Callable[[Job], Coroutine[Any, Any, Built]]
"""Builds in another process."""


class VariantBuilder:
    """Brings variants from `BUILDING` to `READY` or `REFUSED`. Every method belongs to one event loop.

    Args:
        owner: The thread that calls torch.
        config: Which variants may be built, and their minimum gain.
        data_dir: Folder of the weights.
        build: Builds in another process.
        log: Logger; one line for each variant that is used or rejected.
    """

    def __init__(
        self, owner: DeviceThread, config: EngineConfig, data_dir: Path, build: Build, log: Any
    ) -> None:
        self._owner = owner
        self._config = config
        self._data_dir = data_dir
        self.build_apart = build
        self._log = log
        self.graphs_of = graphs_of if config.cuda_graphs else _none_of
        self._one_at_a_time = asyncio.Lock()
        self.used_count = 0
        self.discarded_count = 0

    def keeps_bits(self, deployment: Deployment) -> bool:
        """Whether a variant may be built for callers who accept only bit-equal results."""
        return self.graphs_of(deployment.hosted.device) is not None

    async def build(self, variant: Variant) -> None:
        """Build a variant and the first runner that can be made."""
        async with self._one_at_a_time:
            hosted = variant.deployment.hosted
            variant.folder = VariantFolder()
            built = await self._built(variant, variant.folder.path)
            if built.problem:
                self._log.info("no graph", **described(variant), problem=built.problem)
                variant.problems.append(f"no graph: {first_line(Exception(built.problem))}")
            copy_tree = partial(make_replica, hosted.module)
            variant.ways = candidates(
                variant.recipe,
                variant.numerics,
                built,
                variant.folder.path,
                copy_tree,
                self._owner.thread_count,
                self.graphs_of(hosted.device),
            )
            await self._next_way(variant)

    async def _built(self, variant: Variant, folder: Path) -> Built:
        if variant.numerics is Numerics.EXACT:  # the unmodified model: nothing to build
            return Built()
        hosted = variant.deployment.hosted
        wants_graph = self._config.openvino and has_openvino(hosted.device)
        return await self.build_apart(Job(hosted.spec, self._data_dir, variant.recipe, folder, wants_graph))

    async def attempt(self, variant: Variant, prepared: Prepared) -> None:
        """Compare a variant's runner with eager on a real batch; use it, or take the next candidate."""
        runner = variant.runner
        if runner is None:
            return
        problem = await self._problem(variant, runner, prepared, self._config.min_gain)
        if variant.state is not State.TRYING:  # rejected meanwhile
            return
        if problem:
            self._discard(variant, runner, problem)
            await self._next_way(variant)
            return
        self.used_count += 1
        variant.state, variant.ways = State.READY, iter(())
        variant.clean()
        self._log.info("compiled pass in use", **described(variant, runner))

    async def check_again(self, variant: Variant, prepared: Prepared) -> None:
        """Compare a variant in use with eager again; reject it when it breaks its promise."""
        runner = variant.runner
        if runner is None or not variant.is_ready:
            return
        problem = await self._problem(variant, runner, prepared, 0.0)
        if problem:
            self.give_up(variant, problem)

    def give_up(self, variant: Variant, problem: str) -> None:
        """Reject a variant: its calls run eagerly from now on."""
        if variant.runner is not None:
            self._discard(variant, variant.runner, problem)
        variant.give_up()
        self._log.info("compiled pass abandoned", **described(variant), problem=problem)

    async def _next_way(self, variant: Variant) -> None:
        variant.runner = None
        for way in variant.ways:
            try:
                variant.runner = await self._made(way.make, way.calls_torch)
            except Exception as error:  # noqa: BLE001 - torch and OpenVINO may raise anything
                problem = f"{type(error).__name__}: {error}"[:300]
                self._log.info("compiled pass not built", **described(variant), problem=problem)
                variant.problems.append(f"not built: {type(error).__name__}")
                continue
            variant.state = State.CANDIDATE
            return
        self.give_up(variant, "no other backend is available")

    async def _made(self, make: Callable[[], Runner], calls_torch: bool) -> Runner:
        return await (self._owner.run(make) if calls_torch else asyncio.to_thread(make))

    async def _problem(self, variant: Variant, runner: Runner, prepared: Prepared, min_gain: float) -> str:
        try:
            async with variant.deployment.pool.lease(None) as replica:
                trial = partial(
                    problem_of, runner, variant.recipe, variant.deployment.hosted, prepared, replica, min_gain
                )
                return await self._owner.run(trial)
        except Exception as error:  # noqa: BLE001 - any error of a backend, or a drained pool
            return f"it failed with {type(error).__name__}"

    def _discard(self, variant: Variant, runner: Runner, problem: str) -> None:
        self.discarded_count += 1
        variant.problems.append(f"{runner.engine} in {runner.numerics}: {problem}")
        self._log.info("compiled pass discarded", **described(variant, runner), problem=problem)


def _none_of(_: torch.device) -> GraphApi | None:
    return None


def described(variant: Variant, runner: Runner | None = None) -> dict[str, object]:
    """Return the log fields of a variant."""
    facts: dict[str, object] = {
        "model_id": variant.deployment.hosted.spec.model_id,
        "values": list(variant.recipe.names[:8]),
        "asked": str(variant.numerics),
    }
    return facts if runner is None else {**facts, "engine": runner.engine, "numerics": str(runner.numerics)}
