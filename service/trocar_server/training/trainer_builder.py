"""Trainer builder: trainers from a spec, or from their record on disk.

A built trainer is hosted by the engine under its id, and stored.
"""

import asyncio
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary, WeakSet

from trocar_api.reasons import ErrorReason
from trocar_server.engine.engine import Engine
from trocar_server.errors import ServiceError
from trocar_server.late_imports import import_compiler, late_imports
from trocar_server.models import HostedModel
from trocar_server.models.identity import differing
from trocar_server.storage.fingerprint import fingerprint
from trocar_server.training.checks.spec_checks import check_spec, parse_spec
from trocar_server.training.durable_steps import DurableSteps
from trocar_server.training.files.snapshots import snapshot_state_dict
from trocar_server.training.files.trainer_storage import StorageOnDemand
from trocar_server.training.files.trainer_store import TrainerRecord, check_base
from trocar_server.training.model.lora import peft_library
from trocar_server.training.spec.trainer_spec import TrainerSpec
from trocar_server.training.step.core import TrainerCore
from trocar_server.training.trainer import Trainer


class TrainerBuilder:
    """Builds the trainers of a server.

    Args:
        engine: Hosts the base models, and serves the trainers' models.
        storage: Stores the trainers.
        scratch_dir: Folder for the spool.
        has_durable_steps: Whether calls of the trainers are recorded, see `durable_steps`.
    """

    def __init__(
        self,
        engine: Engine,
        storage: StorageOnDemand,
        scratch_dir: Path,
        *,
        has_durable_steps: bool = False,
    ) -> None:
        self.engine = engine
        self.storage = storage
        self._scratch_dir = scratch_dir
        self._has_durable_steps = has_durable_steps
        self._journals: WeakSet[DurableSteps] = WeakSet()
        self._fingerprints: WeakKeyDictionary[HostedModel, str] = WeakKeyDictionary()

    async def new(self, principal: str, spec: TrainerSpec, request_id: str) -> Trainer:
        """Build a trainer and store its record; a failure leaves nothing of it.

        Raises:
            ServiceError: See `Trainers.create`.
        """
        storage = await asyncio.to_thread(self.storage.get)
        base = self.engine.catalogue.get(spec.model_id)
        core = await self._make_core(spec)
        trainer_id = uuid.uuid4().hex
        try:
            digest = await self._fingerprint(spec.model_id)
            facts = {
                "request_id": request_id,
                "base_weights": base.weights,
                "descriptions": await self._descriptions(spec),
            }
            described = spec.model_dump(mode="json")
            create = partial(storage.trainers.create, trainer_id, principal, described, spec.model_id)
            record = await asyncio.to_thread(create, digest, facts)
            return await self._adopt(record, spec, core)
        except BaseException:
            await self.engine.owner.run(core.close)
            with suppress(ServiceError):
                await asyncio.to_thread(storage.trainers.delete, trainer_id)
            raise

    async def restored(self, record: TrainerRecord) -> Trainer:
        """Build a trainer of an earlier run, from its newest checkpoint.

        Raises:
            ServiceError: `UNKNOWN_MODEL`, `MODEL_NOT_LOADED`, `TRAINER_INVALID`, `CHECKPOINT_CORRUPT`,
                `STORAGE_UNAVAILABLE`.
        """
        spec = parse_spec(record.spec)
        await self._load_models(record, spec)
        core = await self._make_core(spec)
        try:
            check_base(record, await self._fingerprint(spec.model_id))
            storage = await asyncio.to_thread(self.storage.get)
            saved = await asyncio.to_thread(storage.checkpoints.load_newest, record.trainer_id)
            if saved is not None:
                await self.engine.owner.run(lambda: core.load_state(saved.state))
            trainer = await self._adopt(record, spec, core)
            if saved is not None:
                trainer.resume_at(saved)
            if trainer.durable is not None:
                await trainer.replay()
            unfinished = storage.unfinished.get(record.trainer_id, ())
            trainer.notices += tuple(map(_unfinished, unfinished))
            before = record.facts.get("descriptions", {})
            trainer.notices += tuple(_differences(before, await self._descriptions(spec)))
            await trainer.describe()
        except BaseException:
            await self.engine.deployments.release(record.trainer_id)
            await self.engine.owner.run(core.close)
            raise
        return trainer

    def base(self, spec: TrainerSpec) -> HostedModel:
        """Return the model that a trainer starts from.

        Raises:
            ServiceError: `TRAINER_INVALID`, it is another trainer's; `UNKNOWN_MODEL`, `MODEL_NOT_LOADED`.
        """
        hosted = self.engine.catalogue.loaded(spec.model_id)
        if self.engine.catalogue.get(spec.model_id).owner is not None:
            raise ServiceError(
                ErrorReason.TRAINER_INVALID,
                "model_id: a trainer is created from a model of the catalogue; publish the other trainer "
                "first",
            )
        return hosted

    async def _make_core(self, spec: TrainerSpec) -> TrainerCore:
        base, teachers = self.base(spec), self.teachers(spec)
        await asyncio.to_thread(_import_parts, spec)
        recording = await self.engine.checks.recording(spec.model_id)

        def make() -> TrainerCore:
            check_spec(spec, base, recording, teachers)
            return TrainerCore(base, spec, teachers, self._scratch_dir)

        return await self.engine.owner.run(make)

    async def _adopt(self, record: TrainerRecord, spec: TrainerSpec, core: TrainerCore) -> Trainer:
        limit = self.engine.limits.trainer_ttl_s
        trainer = Trainer(
            trainer_id=record.trainer_id,
            principal=record.principal,
            spec=spec,
            core=core,
            engine=self.engine,
            storage=self.storage,
            created_at_s=record.created_at_s,
            ttl_s=min(spec.ttl_s or limit, limit),
            request_id=str(record.facts.get("request_id", "")),
            stored_facts=dict(record.facts),
            durable=self._durable(record.trainer_id),
        )
        own = replace(core.hosted, spec=replace(core.hosted.spec, model_id=trainer.trainer_id))
        await self.engine.deployments.adopt(own, trainer.principal)
        return trainer

    def _durable(self, trainer_id: str) -> DurableSteps | None:
        return DurableSteps(trainer_id, self.storage, self._journals) if self._has_durable_steps else None

    async def _fingerprint(self, model_id: str) -> str:
        hosted = self.engine.catalogue.loaded(model_id)
        if hosted not in self._fingerprints:
            state = await self.engine.owner.run(
                lambda: snapshot_state_dict(hosted.module, hosted.module.state_dict())
            )
            self._fingerprints[hosted] = await asyncio.to_thread(fingerprint, state)
        return self._fingerprints[hosted]

    async def _descriptions(self, spec: TrainerSpec) -> dict[str, dict[str, str]]:
        """Return the parts of the identities, without weights, of the models that a trainer needs, by id."""
        engine = self.engine
        return {
            model_id: dict((await engine.description(engine.deployments.find(model_id))).parts)
            for model_id in {spec.model_id, *teacher_ids(spec)}
        }

    async def _load_models(self, record: TrainerRecord, spec: TrainerSpec) -> None:
        """Load the models that the trainer needs, unless the configuration loads them."""
        for model_id in {spec.model_id, *teacher_ids(spec)}:
            weights = str(record.facts.get("base_weights", "")) if model_id == record.base_model_id else ""
            self._request(model_id, weights)
            try:
                await self.engine.deployments.load(model_id)
            except ServiceError as error:
                raise ServiceError(
                    ErrorReason.MODEL_NOT_LOADED,
                    f"the trainer needs model '{model_id}', which could not be loaded: {error.message}; "
                    "fix the cause, then open the trainer again",
                    cause=error.reason,
                ) from None

    def _request(self, model_id: str, weights: str) -> None:
        """Add a torchvision model to the catalogue, unless it is there already."""
        catalogue = self.engine.catalogue
        if catalogue.has(model_id):
            return
        try:
            catalogue.request(model_id, weights)
        except ServiceError:
            raise ServiceError(
                ErrorReason.UNKNOWN_MODEL,
                f"the trainer needs model '{model_id}', which this server no longer has; ask its operator "
                "to add it to the configuration again, then open the trainer again",
            ) from None

    def teachers(self, spec: TrainerSpec) -> dict[str, HostedModel]:
        """Return the models that a spec distils from, by id."""
        return {model_id: self.engine.catalogue.loaded(model_id) for model_id in teacher_ids(spec)}


def _import_parts(spec: TrainerSpec) -> None:
    """Import what a trainer needs. It takes seconds: not for the thread that owns the device."""
    with late_imports:
        import_compiler()  # the first step of an optimizer does (torch 2.14)
        if spec.lora is not None:
            peft_library()


def teacher_ids(spec: TrainerSpec) -> list[str]:
    """Return the models that a spec distils from, sorted."""
    return sorted({term.teacher.model_id for term in spec.losses if term.teacher is not None})


def _differences(
    before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]
) -> Iterator[str]:
    """Yield a notice for each model that is not as it was; one that was not described yields none."""
    for model_id, parts in sorted(before.items()):
        if names := differing(parts, now.get(model_id, parts)):
            yield (
                f"model '{model_id}' is not as it was when the trainer was created: its {', '.join(names)} "
                "changed, and with it values may have; for the old ones, restore its configuration and files"
            )


def _unfinished(number: int) -> str:
    return (
        f"checkpoint {number} has tensors and no manifest: its save was not completed, or the file was "
        "lost later; it is ignored"
    )
