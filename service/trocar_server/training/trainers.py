"""Trainers of a server: creation, lookup by owner, restore after restarts, expiry.

Belongs to one event loop. Every lookup is by principal: an absent trainer and another principal's are
indistinguishable.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.engine.engine import Engine
from trocar_server.errors import ServiceError, first_line
from trocar_server.models import HostedModel
from trocar_server.tasks import all_done, shielded
from trocar_server.training.elsewhere import Elsewhere
from trocar_server.training.files.trainer_storage import StorageOnDemand
from trocar_server.training.files.trainer_store import TrainerRecord, UnreadableTrainer, moved
from trocar_server.training.phases import TrainerSignal
from trocar_server.training.publishing import OtherPublishing, Publishing
from trocar_server.training.spec.trainer_spec import TrainerSpec
from trocar_server.training.trainer import Trainer
from trocar_server.training.trainer_builder import TrainerBuilder, teacher_ids

_CLEAN_INTERVAL_S = 30.0
_log = structlog.get_logger("trocar")


@dataclass(frozen=True)
class TrainerListener:
    """Callbacks for changes of a server's trainers; see `Trainers.subscribe`."""

    on_close: Callable[[str], Awaitable[None]]
    """Called with the id of a trainer that is being closed, before anything of it is removed."""
    on_moved: Callable[[str], Awaitable[None]]
    """Called with the id of a trainer that another server has taken over."""
    on_taken: Callable[[Trainer], None]
    """Called with a trainer that is restored after the start: it was taken over from another server, or could
    not be restored before."""


class Trainers:
    """The trainers of a server.

    Args:
        engine: Hosts the base models, and serves the trainers' models.
        storage: Stores the trainers.
        scratch_dir: Folder for the spool.
        has_durable_steps: Whether calls of the trainers are recorded, see `durable_steps`.
        elsewhere: Trainers of the other servers of a cluster; None off a cluster.
        published: What the other replicas of a cluster have published; None off a cluster.

    Attributes:
        ready: Set once trainers of an earlier run are restored, with their fits.
    """

    def __init__(
        self,
        engine: Engine,
        storage: StorageOnDemand,
        scratch_dir: Path,
        *,
        has_durable_steps: bool = False,
        elsewhere: Elsewhere | None = None,
        published: OtherPublishing | None = None,
    ) -> None:
        self.engine = engine
        self.storage = storage
        self.publishing = Publishing(engine, storage, published)
        self._elsewhere = elsewhere
        self._builder = TrainerBuilder(engine, storage, scratch_dir, has_durable_steps=has_durable_steps)
        self._trainers: dict[str, Trainer] = {}
        self._creating = asyncio.Lock()
        self._listeners: list[TrainerListener] = []
        self._janitor: asyncio.Task[None] | None = None
        self.ready = asyncio.Event()
        self._unreadable: dict[str, UnreadableTrainer] = {}
        self._storage_problem: ServiceError | None = None
        """Why the disk cannot be read; None while it can."""

    def subscribe(self, listener: TrainerListener) -> None:
        """Report changes of trainers to a listener from now on."""
        self._listeners.append(listener)

    def get(self, principal: str, trainer_id: str) -> Trainer:
        """Return one of a principal's trainers, and renew its time to live.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`; or why it cannot be restored, see `unreadable`.
        """
        result = self._trainers.get(trainer_id)
        if result is None or result.principal != principal:
            unreadable = self._unreadable_one(principal, trainer_id)
            if unreadable is not None:
                raise _again(unreadable.error)
            if self._storage_problem is not None:
                raise _again(self._storage_problem)
            raise ServiceError(
                ErrorReason.UNKNOWN_TRAINER,
                f"you have no trainer '{trainer_id[:80]}'; it may have been closed",
            )
        result.use()
        return result

    async def find(self, principal: str, trainer_id: str) -> Trainer:
        """Return one of a principal's trainers; while the server starts, wait until all are restored.

        A failed restore is tried again: its model or its file may be available by now.

        Raises:
            ServiceError: As `get`.
        """
        await self.ready.wait()
        result = self._trainers.get(trainer_id)
        if result is not None and result.principal == principal:
            if self._elsewhere is not None:
                await self._check_here(result)
            result.use()
            return result
        if result is None and trainer_id not in self._unreadable:
            await self._look_elsewhere(trainer_id)
        if self._storage_problem is not None:
            await self._look_again()
        unreadable = self._unreadable_one(principal, trainer_id) if self._unreadable else None
        if unreadable is not None:
            await shielded(self._try_again(unreadable))
        return self.get(principal, trainer_id)

    async def find_adapter(self, principal: str, model_id: str, name: str) -> Trainer:
        """Return the trainer of one of a principal's adapters, by its name and base model.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`, with the names that there are.
        """
        await self.ready.wait()
        own = self._adapters(principal, model_id)
        if name not in own:
            available = f"available: {', '.join(sorted(own))}" if own else "it has none"
            raise ServiceError(
                ErrorReason.UNKNOWN_TRAINER,
                f"you have no adapter '{name[:80]}' on model '{model_id[:80]}'; {available}",
            )
        own[name].use()
        return own[name]

    def _adapters(self, principal: str, model_id: str) -> dict[str, Trainer]:
        """Return a principal's adapters on a model, by name."""
        return {
            trainer.spec.lora.name: trainer
            for trainer in self.of(principal)
            if trainer.spec.lora is not None and trainer.spec.lora.name and trainer.spec.model_id == model_id
        }

    async def close_any(self, principal: str, trainer_id: str) -> None:
        """Close one of a principal's trainers, even if it cannot be restored.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`, `STORAGE_UNAVAILABLE`.
        """
        await self.ready.wait()
        unreadable = self._unreadable_one(principal, trainer_id)
        if unreadable is None:
            await self.close(await self.find(principal, trainer_id))
            return
        if unreadable.principal is None:  # owner unknown
            raise _again(unreadable.error)
        storage = await asyncio.to_thread(self.storage.get)
        await asyncio.to_thread(storage.trainers.delete, trainer_id)
        self._unreadable.pop(trainer_id, None)

    async def listed(self, principal: str) -> tuple[list[Trainer], list[UnreadableTrainer]]:
        """Return a principal's trainers, oldest first, and those that cannot be restored.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`, the trainers cannot be listed.
        """
        await self.ready.wait()
        if self._storage_problem is not None:
            await self._look_again()
        if self._storage_problem is not None:
            raise _again(self._storage_problem)
        own = [one for one in self._unreadable.values() if one.principal == principal]
        return self.of(principal), sorted(own, key=lambda one: one.trainer_id)

    def unreadable(self) -> Sequence[UnreadableTrainer]:
        """Return every trainer that cannot be restored."""
        return list(self._unreadable.values())

    @property
    def storage_problem(self) -> ServiceError | None:
        """Why trainers can be neither stored nor restored; None when they can."""
        return self._storage_problem

    def _unreadable_one(self, principal: str, trainer_id: str) -> UnreadableTrainer | None:
        """Return a trainer that cannot be restored; without a known owner anyone with its id may see it."""
        result = self._unreadable.get(trainer_id)
        return result if result is not None and result.principal in (principal, None) else None

    def of(self, principal: str) -> list[Trainer]:
        """Return a principal's trainers, oldest first."""
        own = [trainer for trainer in self._trainers.values() if trainer.principal == principal]
        return sorted(own, key=lambda trainer: trainer.created_at_s)

    def serving(self, model_id: str) -> Trainer | None:
        """Return the trainer that has a model's weights; None for a model that no trainer changes."""
        return self._trainers.get(model_id)

    def all(self) -> Sequence[Trainer]:
        """Return every trainer."""
        return list(self._trainers.values())

    async def create(self, principal: str, spec: TrainerSpec, request_id: str = "") -> Trainer:
        """Create a trainer; a repeated request returns the same one.

        Raises:
            ServiceError: `TRAINER_INVALID` with every problem of the spec, `UNKNOWN_MODEL`,
                `MODEL_NOT_LOADED`, `QUOTA_EXCEEDED`, `STORAGE_FULL`, `STORAGE_UNAVAILABLE`.
        """
        await self.ready.wait()
        return await shielded(self._create(principal, spec, request_id))

    async def start(self) -> None:
        """Host published models, and restore the trainers on disk.

        A server whose data directory is in use by another one serves everything but trainers.
        """
        try:
            storage = await asyncio.to_thread(self.storage.existing)
        except ServiceError as error:
            await self._go_without(error)
        else:
            if storage is not None:
                await self.publishing.host_all(storage.published)
                await self.restore_all()
        self._janitor = asyncio.create_task(self._keep_clean())

    async def stop(self, *, is_saving: bool = True) -> None:
        """Release the data directory.

        Args:
            is_saving: Whether to save changed trainers, so that the next start restores them.
        """
        if self._janitor is not None:
            self._janitor.cancel()
            self._janitor = None
        await all_done()
        for trainer in self.all():
            try:
                if is_saving:
                    await trainer.save_changes()
            except ServiceError as error:
                _log.warning("trainer not saved", trainer_id=trainer.trainer_id, why=error.message)
            await self.engine.owner.run(trainer.core.close)
        await asyncio.to_thread(self.storage.close)

    async def stored_ids(self) -> set[str] | None:
        """Return the ids of all trainers on disk, including those that could not be restored.

        None if they are not known: the disk fails, or the data directory is another server's.
        """
        try:
            storage = await asyncio.to_thread(self.storage.existing)
            return set() if storage is None else await asyncio.to_thread(storage.trainers.ids)
        except ServiceError:
            return None

    async def _keep_clean(self) -> None:
        while True:
            await asyncio.sleep(_CLEAN_INTERVAL_S)
            await self.close_expired()

    async def restore_all(self) -> None:
        """Restore the trainers of an earlier run, each from its newest checkpoint.

        One that cannot be restored is logged, stays on disk, and is listed with the reason.
        """
        try:
            storage = await asyncio.to_thread(self.storage.get)
            records, unreadable = await asyncio.to_thread(storage.trainers.survey)
        except ServiceError as error:
            self._storage_problem = error
            _log.warning("no trainers", reason=error.reason, why=error.message)
            return
        self._storage_problem = None
        self._unreadable = {one.trainer_id: one for one in unreadable}
        for record in records:
            if record.trainer_id not in self._trainers:
                await self._bring_back(record)

    async def _go_without(self, error: ServiceError) -> None:
        """Serve everything but trainers; published models are read-only."""
        self._storage_problem = error
        _log.warning("no trainers", reason=error.reason, why=error.message)
        try:
            await self.publishing.host_all(self.storage.published_for_reading())
        except ServiceError as problem:
            _log.warning("no published models", reason=problem.reason, why=problem.message)

    async def _bring_back(self, record: TrainerRecord) -> None:
        """Restore a trainer, or note why that failed."""
        try:
            trainer = self._add(await self._builder.restored(record))
        except Exception as raised:  # noqa: BLE001 - one trainer's files must not end the server
            error = _again(_restore_failure(raised))  # without the frames, which hold the weights
            _log.warning(
                "trainer not restored", trainer_id=record.trainer_id, reason=error.reason, why=error.message
            )
            self._unreadable[record.trainer_id] = UnreadableTrainer(
                record.trainer_id, record.principal, error, record
            )
        else:
            self._unreadable.pop(record.trainer_id, None)
            # Before any call reaches it; at the start, fits are resumed when all trainers are restored.
            for listener in self._listeners if self.ready.is_set() else ():
                listener.on_taken(trainer)

    async def take_over(self, owner: str, trainer_id: str) -> None:
        """Take over a trainer of a lost server, and go on where it was: every acknowledged call is applied.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`, its files cannot be moved.
        """
        await shielded(self._take_over(owner, trainer_id))

    async def settled(self) -> None:
        """Wait until no trainer is being created or taken over."""
        async with self._creating:
            pass

    async def drop_moved(self) -> None:
        """Drop the trainers that other servers have taken over, as this one counted as lost."""
        for trainer in self.all():
            if not await asyncio.to_thread(self._is_here, trainer):
                await shielded(self._drop(trainer))

    async def _take_over(self, owner: str, trainer_id: str) -> None:
        async with self._creating:
            if trainer_id in self._trainers or trainer_id in self._unreadable:
                return
            storage = await asyncio.to_thread(self.storage.get)
            if not await asyncio.to_thread(storage.take_over, owner, trainer_id):
                return
            result = await asyncio.to_thread(storage.trainers.look_at, trainer_id)
            if isinstance(result, UnreadableTrainer):  # it is here all the same, and others follow
                self._unreadable[trainer_id] = result
            elif result is not None:
                await self._bring_back(result)
            if trainer_id in self._trainers:
                _log.info("trainer taken over", trainer_id=trainer_id, of=owner)

    async def _check_here(self, trainer: Trainer) -> None:
        """Refuse a call of a trainer that another server has taken over.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`, with a detail.
        """
        if not await asyncio.to_thread(self._is_here, trainer):
            await shielded(self._drop(trainer))
            raise moved()

    async def _look_elsewhere(self, trainer_id: str) -> None:
        """Refuse a call for a trainer of another server; wait for one that is being taken over here.

        Raises:
            ServiceError: As `Elsewhere.is_here`.
        """
        if self._elsewhere is not None and await self._elsewhere.is_here(trainer_id):
            await self.settled()

    def _is_here(self, trainer: Trainer) -> bool:
        return self.storage.get().trainers.is_here(trainer.trainer_id)

    async def _drop(self, trainer: Trainer) -> None:
        """Release a trainer whose files are no longer this server's."""
        if self._trainers.get(trainer.trainer_id) is not trainer:
            return
        _log.warning("trainer was taken over by another replica", trainer_id=trainer.trainer_id)
        trainer.send(TrainerSignal.CLOSE)
        self._trainers.pop(trainer.trainer_id)
        for listener in self._listeners:
            await listener.on_moved(trainer.trainer_id)
        await self.engine.deployments.release(trainer.trainer_id)
        await self.engine.owner.run(trainer.core.close)

    async def _look_again(self) -> None:
        """Try again to read the disk, which failed before."""
        async with self._creating:
            if self._storage_problem is not None:
                await self.restore_all()

    async def _try_again(self, unreadable: UnreadableTrainer) -> None:
        async with self._creating:
            if unreadable.trainer_id not in self._unreadable:
                return  # another call has restored it
            try:
                storage = await asyncio.to_thread(self.storage.get)
                record = await asyncio.to_thread(storage.trainers.get, unreadable.trainer_id)
            except ServiceError:
                return  # still not readable
            await self._bring_back(record)

    async def close(self, trainer: Trainer) -> None:
        """Close a trainer and delete its checkpoints."""
        await shielded(self._close(trainer))

    async def publish(
        self, trainer: Trainer, model_id: str, categories: tuple[str, ...], *, is_repeated: bool = False
    ) -> None:
        """Publish a copy of a trainer's weights as a model of the catalogue, at once and after restarts.

        See `Publishing.publish`.

        Raises:
            ServiceError: `MODEL_CONFLICT`, the id is taken; `MODEL_INVALID`, the id is not valid.
        """
        base = self._builder.base(trainer.spec)
        publishing = self.publishing.publish(trainer, base, model_id, categories, is_repeated=is_repeated)
        await shielded(publishing)

    def models_of(self, spec: TrainerSpec) -> tuple[HostedModel, dict[str, HostedModel]]:
        """Return the model that a trainer starts from and its teachers by id.

        Raises:
            ServiceError: `MODEL_NOT_LOADED`, one of them was unloaded.
        """
        return self._builder.base(spec), self._builder.teachers(spec)

    async def close_expired(self) -> None:
        """Close every trainer whose time to live has expired."""
        now = time.time()
        for trainer in self.all():
            if trainer.expires_at_s < now and not trainer.is_in_use:
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
            await self.close_expired()  # they would count, and keep the names of their adapters
            elsewhere = 0
            if self._elsewhere is not None:
                elsewhere = await self._elsewhere.count(principal, request_id)
            self._check_room(principal, elsewhere)
            self._check_name(principal, spec)
            return self._add(await self._builder.new(principal, spec, request_id))

    async def _close(self, trainer: Trainer) -> None:
        trainer.send(TrainerSignal.CLOSE)
        self._trainers.pop(trainer.trainer_id, None)
        for listener in self._listeners:
            await listener.on_close(trainer.trainer_id)
        await self.engine.deployments.release(trainer.trainer_id)
        await self.engine.owner.run(trainer.core.close)
        storage = await asyncio.to_thread(self.storage.get)
        await asyncio.to_thread(storage.trainers.delete, trainer.trainer_id)

    async def unpublish(self, principal: str, model_id: str) -> None:
        """Remove a model that a principal published; see `Publishing.remove`.

        Raises:
            ServiceError: `UNKNOWN_MODEL`; `MODEL_CONFLICT`, a trainer uses it; `STORAGE_UNAVAILABLE`.
        """
        async with self._creating:  # no trainer is created on it meanwhile
            needed = {
                needed
                for spec in (trainer.spec for trainer in self.all())
                for needed in (spec.model_id, *teacher_ids(spec))
            }
            needed |= {
                one.record.base_model_id for one in self._unreadable.values() if one.record is not None
            }
            await self.publishing.remove(principal, model_id, needed)

    def _add(self, trainer: Trainer) -> Trainer:
        self._trainers[trainer.trainer_id] = trainer
        return trainer

    def _check_name(self, principal: str, spec: TrainerSpec) -> None:
        taken = self._adapters(principal, spec.model_id).get(_name_of(spec))
        if taken is not None:
            raise ServiceError(
                ErrorReason.TRAINER_INVALID,
                f"lora.name: your trainer {taken.trainer_id} has an adapter '{_name_of(spec)}' on this "
                "model; close it, or choose another name",
            )

    def _check_room(self, principal: str, elsewhere: int) -> None:
        most = self.engine.limits.max_trainers
        if len(self.of(principal)) + elsewhere >= most:
            raise ServiceError(
                ErrorReason.QUOTA_EXCEEDED, f"you have {most} trainers, the maximum; close one"
            )


def _name_of(spec: TrainerSpec) -> str:
    return spec.lora.name if spec.lora is not None else ""


def _again(error: ServiceError) -> ServiceError:
    """Return a copy of an error that is raised repeatedly: its traceback would grow each time."""
    return ServiceError(error.reason, error.message, **error.details)


def _restore_failure(error: Exception) -> ServiceError:
    if isinstance(error, ServiceError):
        return error
    what = f"{type(error).__name__}: {first_line(error)}"
    return ServiceError(
        ErrorReason.CHECKPOINT_CORRUPT, f"the trainer on the server's disk cannot be restored: {what}"
    )
