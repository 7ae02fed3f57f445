"""Building compiled forms in the background, trying them, and giving them up."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trocar_server.config import EngineConfig
from trocar_server.engine.device import DeviceThread
from trocar_server.engine.form_trial import problem_of
from trocar_server.engine.forms import Form, State
from trocar_server.engine.hosting import Host
from trocar_server.engine.work import Prepared
from trocar_server.engines import Numerics
from trocar_server.engines.candidates import Runner, candidates, has_openvino
from trocar_server.engines.form_folder import FormFolder
from trocar_server.engines.graphs import GraphApi, graphs_of
from trocar_server.engines.worker import Built, Job
from trocar_server.models import make_replica

Build = Callable[[Job], Coroutine[Any, Any, Built]]
"""Builds in another process."""


class FormBuilder:
    """Brings forms from `BUILDING` to `READY` or `REFUSED`. Every method belongs to one event loop.

    Args:
        owner: The thread that calls torch.
        config: What may be built, and what a form has to gain.
        data_dir: Where weights are kept.
        build: Builds in another process.
        log: Takes a line for each form that is used or given up.
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

    def keeps_bits(self, host: Host) -> bool:
        """Whether a form may be built for callers who take nothing but eager's own bits."""
        return self.graphs_of(host.hosted.device) is not None

    async def build(self, form: Form) -> None:
        """Build a form and make the first runner that can be made."""
        async with self._one_at_a_time:
            hosted = form.host.hosted
            form.folder = FormFolder()
            built = await self._built(form, form.folder.path)
            if built.problem:
                self._log.info("no graph", **described(form), problem=built.problem)
            copy_tree = partial(make_replica, hosted.module)
            form.ways = candidates(
                form.recipe,
                form.numerics,
                built,
                form.folder.path,
                copy_tree,
                self._owner.thread_count,
                self.graphs_of(hosted.device),
            )
            await self._next_way(form)

    async def _built(self, form: Form, folder: Path) -> Built:
        if form.numerics is Numerics.EXACT:  # the model as it is: there is nothing to build
            return Built()
        hosted = form.host.hosted
        wants_graph = self._config.openvino and has_openvino(hosted.device)
        return await self.build_apart(Job(hosted.spec, self._data_dir, form.recipe, folder, wants_graph))

    async def attempt(self, form: Form, prepared: Prepared) -> None:
        """Compare a form's runner with eager on a real batch; use it, or go on to the next way."""
        runner = form.runner
        if runner is None:
            return
        problem = await self._problem(form, runner, prepared, self._config.min_gain)
        if form.state is not State.TRYING:  # given up meanwhile
            return
        if problem:
            self._discard(form, runner, problem)
            await self._next_way(form)
            return
        self.used_count += 1
        form.state, form.ways = State.READY, iter(())
        form.clean()
        self._log.info("compiled form in use", **described(form, runner))

    async def check_again(self, form: Form, prepared: Prepared) -> None:
        """Compare a form in use with eager once more; give it up when it does not keep its promise."""
        runner = form.runner
        if runner is None or not form.is_ready:
            return
        problem = await self._problem(form, runner, prepared, 0.0)
        if problem:
            self.give_up(form, problem)

    def give_up(self, form: Form, problem: str) -> None:
        """Let a form's calls run eagerly from now on."""
        if form.runner is not None:
            self._discard(form, form.runner, problem)
        form.give_up()
        self._log.info("compiled form given up", **described(form), problem=problem)

    async def _next_way(self, form: Form) -> None:
        form.runner = None
        for way in form.ways:
            try:
                form.runner = await self._made(way.make, way.calls_torch)
            except Exception as error:  # noqa: BLE001 - of torch or OpenVINO, whatever the model is
                problem = f"{type(error).__name__}: {error}"[:300]
                self._log.info("compiled form not made", **described(form), problem=problem)
                continue
            form.state = State.CANDIDATE
            return
        self.give_up(form, "there is nothing else to try")

    async def _made(self, make: Callable[[], Runner], calls_torch: bool) -> Runner:
        return await (self._owner.run(make) if calls_torch else asyncio.to_thread(make))

    async def _problem(self, form: Form, runner: Runner, prepared: Prepared, min_gain: float) -> str:
        try:
            async with form.host.pool.lease(None) as replica:
                trial = partial(
                    problem_of, runner, form.recipe, form.host.hosted, prepared, replica, min_gain
                )
                return await self._owner.run(trial)
        except Exception as error:  # noqa: BLE001 - whatever an engine raises, or the pool's end
            return f"it failed with {type(error).__name__}"

    def _discard(self, form: Form, runner: Runner, problem: str) -> None:
        self.discarded_count += 1
        self._log.info("compiled form discarded", **described(form, runner), problem=problem)


def _none_of(_: torch.device) -> GraphApi | None:
    return None


def described(form: Form, runner: Runner | None = None) -> dict[str, object]:
    """Return what a line of the log says of a form."""
    facts: dict[str, object] = {
        "model_id": form.host.hosted.spec.model_id,
        "values": list(form.recipe.names[:8]),
        "asked": str(form.numerics),
    }
    return facts if runner is None else {**facts, "engine": runner.engine, "numerics": str(runner.numerics)}
