"""All trainers of a server: made, found by their owner, kept over restarts, closed when nobody uses them.

Belongs to one event loop. Every look-up is by principal: what is absent and what is somebody else's read the
same.
"""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.engine.engine import Engine
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel
from trocar_server.training.checking import check_spec, parse_spec
from trocar_server.training.core import TrainerCore
from trocar_server.training.fingerprint import fingerprint
from trocar_server.training.publishing import Publishing
from trocar_server.training.snapshots import snapshot_state_dict
from trocar_server.training.spec import TrainerSpec
from trocar_server.training.storage import StorageOnDemand
from trocar_server.training.trainer import Trainer
from trocar_server.training.trainer_calls import TrainerActivity
from trocar_server.training.trainer_store import TrainerRecord, check_base
from trocar_server.training.whole import all_done, whole

_CLEAN_INTERVAL_S = 30.0
_log = structlog.get_logger("trocar")


class Trainers:
    """The trainers of a server.

    Args:
        engine: Has the models that trainers begin with, and serves the trainers' own.
        storage: Where they are kept.
        scratch_dir: Where the spool may write.

    Attributes:
        on_close: Called with the id of a trainer that is being closed, before anything of it goes.
        ready: Set when those of an earlier run are back, with their fits.
    """

    def __init__(self, engine: Engine, storage: StorageOnDemand, scratch_dir: Path) -> None:
        self.engine = engine
        self.storage = storage
        self.publishing = Publishing(engine, storage)
        self._scratch_dir = scratch_dir
        self._trainers: dict[str, Trainer] = {}
        self._creating = asyncio.Lock()
        self.on_close: Callable[[str], Awaitable[None]] | None = None
        self._janitor: asyncio.Task[None] | None = None
        self.ready = asyncio.Event()
        self._fingerprints: WeakKeyDictionary[HostedModel, str] = WeakKeyDictionary()

    def get(self, principal: str, trainer_id: str) -> Trainer:
        """Return one of a principal's trainers, and renew its time to live.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`.
        """
        found = self._trainers.get(trainer_id)
        if found is None or found.principal != principal:
            raise ServiceError(
                ErrorReason.UNKNOWN_TRAINER,
                f"you have no trainer '{trainer_id[:80]}'; it may have been closed",
            )
        found.use()
        return found

    async def find(self, principal: str, trainer_id: str) -> Trainer:
        """Return one of a principal's trainers; while the server starts, wait until all are back.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`.
        """
        await self.ready.wait()
        return self.get(principal, trainer_id)

    def of(self, principal: str) -> list[Trainer]:
        """Return a principal's trainers, oldest first."""
        own = [trainer for trainer in self._trainers.values() if trainer.principal == principal]
        return sorted(own, key=lambda trainer: trainer.created_at_s)

    def all(self) -> Sequence[Trainer]:
        """Return every trainer."""
        return list(self._trainers.values())

    async def create(self, principal: str, spec: TrainerSpec, request_id: str = "") -> Trainer:
        """Make a trainer; a request that was answered before returns the same one.

        Raises:
            ServiceError: `TRAINER_INVALID` with every problem of the spec, `UNKNOWN_MODEL`,
                `MODEL_NOT_LOADED`, `QUOTA_EXCEEDED`, `STORAGE_FULL`, `STORAGE_UNAVAILABLE`.
        """
        await self.ready.wait()
        return await whole(self._create(principal, spec, request_id))

    async def start(self) -> None:
        """Host what was published, and bring trainers back where there are any on disk.

        A server whose data directory another one uses goes without: it serves everything but trainers.
        """
        try:
            storage = await asyncio.to_thread(self.storage.existing)
            if storage is not None:
                await self.publishing.host_all(storage)
                await self.restore_all()
        except ServiceError as error:
            _log.warning("no trainers", reason=error.reason, why=error.message)
        self._janitor = asyncio.create_task(self._keep_clean())

    async def stop(self) -> None:
        """Save what has changed and let go of the data directory; at the next start trainers come back."""
        if self._janitor is not None:
            self._janitor.cancel()
            self._janitor = None
        await all_done()
        for trainer in self.all():
            try:
                await trainer.save_changes()
            except ServiceError as error:
                _log.warning("trainer not saved", trainer_id=trainer.trainer_id, why=error.message)
            await self.engine.owner.run(trainer.core.close)
        await asyncio.to_thread(self.storage.close)

    async def stored_ids(self) -> set[str]:
        """Return the ids of all trainers on disk, those that could not be brought back included."""
        try:
            storage = await asyncio.to_thread(self.storage.existing)
            return set() if storage is None else await asyncio.to_thread(storage.trainers.ids)
        except ServiceError:
            return {trainer.trainer_id for trainer in self.all()}

    async def _keep_clean(self) -> None:
        while True:
            await asyncio.sleep(_CLEAN_INTERVAL_S)
            await self.close_expired()

    async def restore_all(self) -> None:
        """Bring the trainers of an earlier run back, each from its newest checkpoint.

        One that cannot come back is logged, and stays on disk.
        """
        storage = await asyncio.to_thread(self.storage.get)
        for record in await asyncio.to_thread(storage.trainers.entries):
            try:
                await self._restore(record)
            except ServiceError as error:
                _log.warning(
                    "trainer not restored",
                    trainer_id=record.trainer_id,
                    reason=error.reason,
                    why=error.message,
                )

    async def close(self, trainer: Trainer) -> None:
        """Close a trainer and delete its checkpoints."""
        await whole(self._close(trainer))

    async def publish(self, trainer: Trainer, model_id: str, categories: tuple[str, ...]) -> None:
        """Make a copy of a trainer's weights a model of the catalogue, at once and after restarts.

        Raises:
            ServiceError: `MODEL_CONFLICT`, there is a model of this id; `MODEL_INVALID`, the id is none.
        """
        base = self._base(trainer.spec)
        await whole(self.publishing.publish(trainer, base, model_id, categories))

    async def close_expired(self) -> None:
        """Close every trainer that nobody has used for as long as it may live."""
        now = time.time()
        for trainer in self.all():
            if trainer.expires_at_s < now and trainer.activity is TrainerActivity.READY:
                _log.info("trainer expired", trainer_id=trainer.trainer_id)
                try:
                    await self.close(trainer)
                except ServiceError as error:
                    _log.warning("trainer stays on disk", trainer_id=trainer.trainer_id, why=error.message)

    async def _create(self, principal: str, spec: TrainerSpec, request_id: str) -> Trainer:
        async with self._creating:
            for trainer in self.of(principal):
                if request_id and trainer.request_id == request_id:
                    return trainer
            self._check_room(principal)
            storage = await asyncio.to_thread(self.storage.get)
            base = self.engine.catalogue.get(spec.model_id)
            core = await self._make_core(spec)
            trainer_id = uuid.uuid4().hex
            try:
                digest = await self._fingerprint(spec.model_id)
                facts = {"request_id": request_id, "base_weights": base.weights}
                described = spec.model_dump(mode="json")
                create = partial(storage.trainers.create, trainer_id, principal, described, spec.model_id)
                record = await asyncio.to_thread(create, digest, facts)
                return await self._adopt(record, spec, core)
            except BaseException:
                await self.engine.owner.run(core.close)
                with suppress(ServiceError):
                    await asyncio.to_thread(storage.trainers.delete, trainer_id)
                raise

    async def _close(self, trainer: Trainer) -> None:
        trainer.is_closed = True
        self._trainers.pop(trainer.trainer_id, None)
        if self.on_close is not None:
            await self.on_close(trainer.trainer_id)
        await self.engine.release(trainer.trainer_id)
        await self.engine.owner.run(trainer.core.close)
        storage = await asyncio.to_thread(self.storage.get)
        await asyncio.to_thread(storage.trainers.delete, trainer.trainer_id)

    async def unpublish(self, principal: str, model_id: str) -> None:
        """Remove a model that a principal published; see `Publishing.remove`.

        Raises:
            ServiceError: `UNKNOWN_MODEL`; `MODEL_CONFLICT`, a trainer needs it; `STORAGE_UNAVAILABLE`.
        """
        async with self._creating:  # no trainer begins with it meanwhile
            needed = {
                needed
                for spec in (trainer.spec for trainer in self.all())
                for needed in (spec.model_id, *_teacher_ids(spec))
            }
            await self.publishing.remove(principal, model_id, needed)

    async def _make_core(self, spec: TrainerSpec) -> TrainerCore:
        base, teachers = self._base(spec), self._teachers(spec)
        recording = await self.engine.checks.recording(spec.model_id)

        def make() -> TrainerCore:
            check_spec(spec, base, recording, teachers)
            return TrainerCore(base, spec, teachers, self._scratch_dir)

        return await self.engine.owner.run(make)

    async def _restore(self, record: TrainerRecord) -> None:
        spec = parse_spec(record.spec)
        await self._load_models(record, spec)
        core = await self._make_core(spec)
        check_base(record, await self._fingerprint(spec.model_id))
        storage = await asyncio.to_thread(self.storage.get)
        saved = await asyncio.to_thread(storage.checkpoints.load_newest, record.trainer_id)
        if saved is not None:
            await self.engine.owner.run(lambda: core.load_state(saved.state))
        trainer = await self._adopt(record, spec, core)
        if saved is not None:
            trainer.resume_at(saved)
        await trainer.describe()

    async def _fingerprint(self, model_id: str) -> str:
        hosted = self.engine.catalogue.loaded(model_id)
        if hosted not in self._fingerprints:
            state = await self.engine.owner.run(
                lambda: snapshot_state_dict(hosted.module, hosted.module.state_dict())
            )
            self._fingerprints[hosted] = await asyncio.to_thread(fingerprint, state)
        return self._fingerprints[hosted]

    async def _load_models(self, record: TrainerRecord, spec: TrainerSpec) -> None:
        """Load what the trainer was made of, where no configuration has done so."""
        for model_id in {spec.model_id, *_teacher_ids(spec)}:
            if model_id == record.base_model_id:
                self._request(model_id, str(record.facts.get("base_weights", "")))
            await self.engine.load(model_id)

    def _request(self, model_id: str, weights: str) -> None:
        try:
            self.engine.catalogue.get(model_id)
        except ServiceError:
            self.engine.catalogue.request(model_id, weights)

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
        )
        own = replace(core.hosted, spec=replace(core.hosted.spec, model_id=trainer.trainer_id))
        await self.engine.adopt(own, trainer.principal)
        self._trainers[trainer.trainer_id] = trainer
        return trainer

    def _base(self, spec: TrainerSpec) -> HostedModel:
        hosted = self.engine.catalogue.loaded(spec.model_id)
        if self.engine.catalogue.get(spec.model_id).owner is not None:
            raise ServiceError(
                ErrorReason.TRAINER_INVALID,
                "model_id: a trainer begins with a model of the catalogue; publish the other trainer first",
            )
        return hosted

    def _teachers(self, spec: TrainerSpec) -> dict[str, HostedModel]:
        return {model_id: self.engine.catalogue.loaded(model_id) for model_id in _teacher_ids(spec)}

    def _check_room(self, principal: str) -> None:
        most = self.engine.limits.max_trainers
        if len(self.of(principal)) >= most:
            raise ServiceError(
                ErrorReason.QUOTA_EXCEEDED, f"you have {most} trainers, the most there can be; close one"
            )


def _teacher_ids(spec: TrainerSpec) -> list[str]:
    return sorted({term.teacher.model_id for term in spec.losses if term.teacher is not None})
