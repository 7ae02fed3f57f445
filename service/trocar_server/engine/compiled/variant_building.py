"""Variant building: background builds, trials and rejection of compiled variants."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.config import EngineConfig
from trocar_server.engine.compiled.backends.build_worker import Built, Job
from trocar_server.engine.compiled.backends.candidates import Candidate, Runner, candidates, has_openvino
from trocar_server.engine.compiled.backends.graphs import GraphApi, graphs_of
from trocar_server.engine.compiled.backends.openvino_runner import OpenVinoRunner
from trocar_server.engine.compiled.environment import environment_digest
from trocar_server.engine.compiled.variant import State, Variant
from trocar_server.engine.compiled.variant_record import VariantRecord
from trocar_server.engine.compiled.variant_store import KeptVariant, VariantStore
from trocar_server.engine.compiled.variant_trial import (
    NOT_FINITE,
    NOT_WITHIN,
    OTHER_SIGNATURE,
    Batch,
    batch_of,
    example_batch,
    problem_of,
)
from trocar_server.engine.host.deployment import Deployment
from trocar_server.engine.request.numerics import Numerics
from trocar_server.engine.run.bound_call import Prepared
from trocar_server.engine.schedule.device import DeviceThread
from trocar_server.engine.schedule.device_memory import is_out_of_memory
from trocar_server.errors import ServiceError, first_line
from trocar_server.models import make_replica
from trocar_server.models.identity import Identity
from trocar_server.storage.temporary_folder import TemporaryFolder

_NO_MEMORY = "the device has too little memory for the trial"
_NO_REPLICA = "no replica was free for the trial, or the model was unloaded"
_NOT_NOW = frozenset({_NO_REPLICA, _NO_MEMORY})
"""Trials that could not be made: another time they may."""

_UNTRIED = frozenset({OTHER_SIGNATURE, NOT_WITHIN, NOT_FINITE, *_NOT_NOW})
"""Trials that tell nothing about a runner."""

_COUNTED = frozenset({NOT_FINITE, _NO_MEMORY})
_MOST_COUNTED = 3
"""Of those in `_COUNTED`, after which a variant's candidates are rejected for it."""

_WITHOUT_REPLICA = (ErrorReason.SERVER_BUSY, ErrorReason.MODEL_NOT_LOADED)
"""Of a lease: too many calls wait, or the model was unloaded."""

Build = Callable[[Job], Coroutine[Any, Any, Built]]
"""Builds in another process."""
Identify = Callable[[Deployment], Awaitable[Identity]]
"""Returns which model a deployment serves."""


class NotRestoredError(Exception):
    """A kept variant cannot be used."""


class NotKeptError(Exception):
    """A variant cannot be kept for the next process."""


class VariantBuilder:
    """Brings variants from `BUILDING` to `READY` or `REFUSED`. Every method belongs to one event loop.

    Args:
        owner: The thread that calls torch.
        config: Which variants may be built, and their minimum gain.
        data_dir: Folder of the weights.
        build: Builds in another process.
        log: Logger; one line for each variant that is used or rejected.
        store: Keeps accepted variants on disk; None keeps none.
        identify: Returns which model a deployment serves; needed where variants are kept.
    """

    def __init__(
        self,
        owner: DeviceThread,
        config: EngineConfig,
        data_dir: Path,
        build: Build,
        log: Any,
        store: VariantStore | None = None,
        identify: Identify | None = None,
    ) -> None:
        self._owner = owner
        self._config = config
        self._data_dir = data_dir
        self.build_apart = build
        self._log = log
        self.graphs_of = graphs_of if config.cuda_graphs else _none_of
        self._store = store
        self._identify = identify
        self._one_at_a_time = asyncio.Lock()
        self.used_count = 0
        self.discarded_count = 0

    def keeps_bits(self, deployment: Deployment) -> bool:
        """Whether a variant may be built for callers who accept only bit-equal results."""
        return self.graphs_of(deployment.hosted.device) is not None

    async def build(self, variant: Variant) -> None:
        """Build a variant and the first runner that can be made."""
        async with self._one_at_a_time:
            variant.folder = await asyncio.to_thread(self._new_folder)
            variant.built = built = await self._built(variant, variant.folder.path)
            if built.problem:
                self._log.info("no graph", **described(variant), problem=built.problem)
                variant.problems.append(f"no graph: {first_line(Exception(built.problem))}")
            variant.ways = self._candidates(variant, variant.folder.path)
            await self._next_way(variant)

    def _new_folder(self) -> TemporaryFolder:
        """Create a folder to build in: where it can be kept, unless that disk is full."""
        if self._store is not None:
            with suppress(OSError):
                return self._store.new_folder()
        return TemporaryFolder()

    def _candidates(self, variant: Variant, folder: Path) -> Iterator[Candidate]:
        hosted = variant.deployment.hosted
        return candidates(
            variant.recipe,
            variant.numerics,
            variant.built,
            folder,
            partial(make_replica, hosted.module),
            self._owner.thread_count,
            self.graphs_of(hosted.device),
        )

    async def _built(self, variant: Variant, folder: Path) -> Built:
        if variant.numerics is Numerics.EXACT:  # the unmodified model: nothing to build
            return Built()
        hosted = variant.deployment.hosted
        wants_graph = self._config.openvino and has_openvino(hosted.device)
        return await self.build_apart(Job(hosted.spec, self._data_dir, variant.recipe, folder, wants_graph))

    async def attempt(self, variant: Variant, prepared: Prepared) -> None:
        """Compare a variant's runner with eager on a real batch; use it, or take the next candidate."""
        await self._attempt(variant, partial(batch_of, prepared))

    async def warm(self, variant: Variant) -> None:
        """Build a variant, and try its candidates on an example until one is accepted or all are rejected.

        Args:
            variant: In the state `BUILDING`; in the end in `READY` or `REFUSED`, or in `CANDIDATE` where
                no replica or too little memory was free: a later call is its trial.
        """
        await self.build(variant)
        batch = partial(example_batch, variant.deployment.hosted, variant.recipe)
        variant.is_proven = False
        problem = ""
        while variant.state is State.CANDIDATE and problem not in _NOT_NOW:
            variant.state = State.TRYING
            problem = await self._attempt(variant, batch)

    async def _attempt(self, variant: Variant, batch: Batch) -> str:
        """Try a variant's runner, and return the problem; empty where it is in use now."""
        runner = variant.runner
        if runner is None:
            return ""
        problem = await self._problem(variant, runner, batch, self._config.min_gain)
        if variant.state is not State.TRYING:  # rejected meanwhile
            return problem
        variant.undecided_count += problem in _COUNTED
        is_hopeless = problem in _COUNTED and variant.undecided_count >= _MOST_COUNTED
        if problem in _UNTRIED and not is_hopeless:  # another call's batch may do, or another time
            variant.state = State.CANDIDATE
        elif problem:
            self._discard(variant, runner, problem)
            await self._next_way(variant)
        else:
            self._use(variant, runner)
            await self._keep(variant, runner)
            variant.clean()
        return problem

    def _use(self, variant: Variant, runner: Runner, event: str = "compiled pass in use") -> None:
        self.used_count += 1
        variant.state, variant.ways = State.READY, iter(())
        self._log.info(event, **described(variant, runner), mixed_rows=variant.built.mixed_rows)

    async def check_again(self, variant: Variant, prepared: Prepared) -> None:
        """Compare a variant in use with eager again; reject it when it breaks its promise."""
        runner = variant.runner
        if runner is None or not variant.is_ready:
            return
        batch = partial(batch_of, prepared)
        problem = await self._problem(variant, runner, batch, 0.0)
        if problem in _UNTRIED:  # it proves nothing
            return
        if problem:
            self.give_up(variant, problem)
        elif variant.kept_key is not None and self._store is not None:
            await asyncio.to_thread(self._store.touch, variant.kept_key)

    def give_up(self, variant: Variant, problem: str) -> None:
        """Reject a variant: its calls run eagerly from now on."""
        if variant.runner is not None:
            self._discard(variant, variant.runner, problem)
        if variant.kept_key is not None and self._store is not None:
            self._store.remove(variant.kept_key)
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

    async def _problem(self, variant: Variant, runner: Runner, batch: Batch, min_gain: float) -> str:
        try:
            async with variant.deployment.pool.lease(None) as replica:
                trial = partial(problem_of, runner, variant.recipe, batch, replica, min_gain)
                return await self._owner.run(trial)
        except Exception as error:  # noqa: BLE001 - any error of a backend
            if isinstance(error, ServiceError) and error.reason in _WITHOUT_REPLICA:
                return _NO_REPLICA
            return _NO_MEMORY if is_out_of_memory(error) else f"it failed with {type(error).__name__}"

    async def find_kept(self, deployment: Deployment) -> Sequence[KeptVariant]:
        """Return the kept variants of a model, most recently used first."""
        store = self._store
        if store is None or deployment.may_change or not await asyncio.to_thread(store.has_any):
            return []
        try:
            digest = await self._digest(deployment)
        except Exception:  # noqa: BLE001 - an odd module: nothing of it was kept
            return []
        if not digest:
            return []
        return await asyncio.to_thread(store.find, digest, environment_digest())

    async def restore(self, variant: Variant, kept: KeptVariant) -> None:
        """Use a kept variant, if it is undamaged and as close to eager as promised; otherwise remove it.

        Args:
            variant: In the state `BUILDING`; in the end in `READY`, or as if nobody had asked for it.
            kept: Its record and files.
        """
        store, key = self._store, kept.record.key
        if store is None:
            return
        try:
            variant.runner = await self._kept_runner(store, variant, kept)
        except Exception as error:  # noqa: BLE001 - a backend may raise anything
            problem = first_line(error)
            self._log.warning("compiled pass not restored", **described(variant), problem=problem)
            may_work_later = problem in _NOT_NOW or is_out_of_memory(error)
            if not may_work_later:
                await asyncio.to_thread(store.remove, key)
            variant.state, variant.built = State.COUNTING, Built()
            return
        variant.kept_key, variant.is_proven = key, False
        self._use(variant, variant.runner, "compiled pass restored")
        await asyncio.to_thread(store.touch, key)

    async def _kept_runner(self, store: VariantStore, variant: Variant, kept: KeptVariant) -> Runner:
        """Make the runner of a kept variant, and compare it with eager on an example.

        Raises:
            DamagedError: It is not as it was written.
            NotRestoredError: The backend is not there any more, or its values are too far from eager.
            Exception: Any error of a backend.
        """
        await asyncio.to_thread(store.check, kept)
        record, variant.built = kept.record, kept.record.built
        wanted = (record.engine, record.numerics)
        for way in self._candidates(variant, kept.folder):
            if (way.engine, way.numerics) == wanted:
                runner = await self._made(way.make, way.calls_torch)
                batch = partial(example_batch, variant.deployment.hosted, variant.recipe)
                if problem := await self._problem(variant, runner, batch, 0.0):
                    raise NotRestoredError(problem)
                return runner
        raise NotRestoredError(f"no backend {record.engine} here")

    async def _keep(self, variant: Variant, runner: Runner) -> None:
        """Keep an accepted variant for the next process; without a store, or on a full disk, do nothing."""
        store, folder, hosted = self._store, variant.folder, variant.deployment.hosted
        if store is None or folder is None or hosted.device.type != "cpu":
            return
        try:
            if not (digest := await self._digest(variant.deployment)):
                raise NotKeptError("its weights have no digest, or its code is in no file")
            identity = digest, environment_digest()
            used = (runner.engine, runner.numerics)
            record = VariantRecord.of(identity, variant.recipe, variant.numerics, used, variant.built)
            variant.kept_key = await asyncio.to_thread(_kept, store, folder, record)
        except Exception as error:  # noqa: BLE001 - a full disk, or tensors or code without a digest
            self._log.warning("compiled pass not kept", **described(variant), problem=first_line(error))

    async def _digest(self, deployment: Deployment) -> str:
        """Return the digest of a model's identity; empty where it does not tell one model from another."""
        if self._identify is None:
            return ""
        identity = await self._identify(deployment)
        return identity.digest if identity.is_lasting and identity.has_code else ""

    def _discard(self, variant: Variant, runner: Runner, problem: str) -> None:
        self.discarded_count += 1
        variant.problems.append(f"{runner.engine} in {runner.numerics}: {problem}")
        self._log.info("compiled pass discarded", **described(variant, runner), problem=problem)


def _kept(store: VariantStore, folder: TemporaryFolder, record: VariantRecord) -> str | None:
    if record.engine != OpenVinoRunner.engine:
        for path in folder.path.iterdir():  # no other backend reads them
            path.unlink()
    return store.keep(folder, record)


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
