"""Publishing of trained models: writing, hosting, removing. Belongs to one event loop."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.engine.engine import Engine
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel
from trocar_server.models.spec import check_model_id
from trocar_server.tasks import shielded
from trocar_server.training.files.published import PublishedStore
from trocar_server.training.files.published_records import PublishedModel
from trocar_server.training.files.snapshots import snapshot_weights
from trocar_server.training.files.trainer_janitor import TRAINER_ID
from trocar_server.training.files.trainer_storage import StorageOnDemand
from trocar_server.training.model.head import class_counts, replace_head
from trocar_server.training.trainer import Trainer

_log = structlog.get_logger("trocar")


Take = Callable[[Path], Awaitable[None]]
"""Takes and hosts the models in a folder of published models."""


class OtherPublishing(Protocol):
    """What other replicas of a cluster have published."""

    async def take_lost(self, take: Take) -> None:
        """Call `take` with the folder of each replica that has gone, while no other replica does."""

    def claim(self, model_id: str) -> AbstractAsyncContextManager[PublishedStore | None]:
        """Keep others from publishing; gives the store of the one that has this id, if any has."""
        ...


class Publishing:
    """Published models, on disk and in the catalogue.

    Args:
        engine: Hosts the models.
        storage: Stores the models.
        others: What the other replicas of a cluster have published; None off a cluster.
    """

    def __init__(
        self, engine: Engine, storage: StorageOnDemand, others: OtherPublishing | None = None
    ) -> None:
        self._engine = engine
        self._storage = storage
        self._one_at_a_time = asyncio.Lock()
        self._others = others

    async def host_all(self, store: PublishedStore) -> None:
        """Host the models published earlier; those that cannot be hosted are listed with the reason."""
        models, unreadable = await asyncio.to_thread(store.survey)
        for model_id, error in unreadable.items():
            with suppress(ServiceError):  # a foreign folder, whose name is not a model id
                check_model_id(model_id)
                self._engine.catalogue.add_failed(model_id, error)
        await self._host(store, models)

    async def take_lost(self) -> None:
        """Take and host what replicas published that have gone; nothing off a cluster.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`.
        """
        if self._others is not None:
            await self._others.take_lost(self.take)

    async def take(self, folder: Path) -> None:
        """Take and host the models that another server published, which has gone; see `PublishedStore.take`.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`.
        """
        store = (await asyncio.to_thread(self._storage.get)).published
        models = await asyncio.to_thread(store.take, folder)
        await self._host(store, models)
        for model in models:
            _log.info("published model taken over", model_id=model.model_id)

    async def _host(self, store: PublishedStore, models: Sequence[PublishedModel]) -> None:
        for model in models:
            try:
                self._engine.catalogue.add(store.model_spec(model, replace_head)).begin()
                await self._engine.deployments.load(model.model_id)
            except ServiceError as error:
                self._engine.catalogue.add_failed(model.model_id, error)
                _log.warning("published model not hosted", model_id=model.model_id, why=error.message)

    async def publish(
        self,
        trainer: Trainer,
        base: HostedModel,
        model_id: str,
        categories: tuple[str, ...],
        *,
        is_repeated: bool = False,
    ) -> None:
        """Publish a copy of a trainer's weights as a model of the catalogue, at once and after restarts.

        Args:
            trainer: The trainer. Its moving averages are published, if it has any.
            base: The trainer's base model.
            model_id: The new model's id.
            categories: Class names by index. When empty: those of the data set of the newest fit where the
                trainer has a new head, else the trainer's own.
            is_repeated: Whether the call was sent before: it has succeeded if the caller's model of this id
                has these weights.

        Raises:
            ServiceError: `MODEL_CONFLICT`, the id is taken; `MODEL_INVALID`, the id is not valid;
                `INVALID_ARGUMENT`, the trainer has an adapter, or the class names do not fit;
                `TRAINER_BROKEN`; `STORAGE_UNAVAILABLE`.
        """
        async with self._one_at_a_time:  # a repeated call may come while the first one runs
            await self._publish(trainer, base, model_id, categories, is_repeated=is_repeated)

    async def _publish(
        self,
        trainer: Trainer,
        base: HostedModel,
        model_id: str,
        categories: tuple[str, ...],
        *,
        is_repeated: bool,
    ) -> None:
        check_model_id(model_id)
        if TRAINER_ID.fullmatch(model_id):  # do not reveal whether such a trainer exists
            raise ServiceError(
                ErrorReason.MODEL_INVALID,
                "32 hexadecimal digits are reserved for ids of trainers; choose another id",
            )
        if trainer.spec.lora is not None:
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT,
                "a trainer with an adapter cannot be published; export the adapter, or name it in calls",
            )
        check_categories(categories, class_counts(await self._engine.checks.described(trainer.trainer_id)))
        if is_repeated:  # its server may have gone with its answer
            await self.take_lost()
        is_taken = self._engine.catalogue.has(model_id)
        if is_taken and not is_repeated:
            raise _taken(model_id)
        storage = await asyncio.to_thread(self._storage.get)
        async with trainer.numbering.at_rest():
            weights = await self._engine.owner.run(partial(snapshot_weights, trainer.core))
        async with nullcontext() if self._others is None else self._others.claim(model_id) as elsewhere:
            if is_taken or elsewhere is not None:
                has = (elsewhere or storage.published).has
                own = (model_id, trainer.principal, base, weights)
                if is_repeated and await asyncio.to_thread(has, *own):
                    return
                raise _taken(model_id)
            published = await asyncio.to_thread(
                storage.published.publish,
                model_id,
                trainer.principal,
                base,
                weights,
                heads=() if trainer.spec.head is None else (trainer.spec.head,),
                categories=categories or trainer.fitted_categories or trainer.core.hosted.categories,
            )
        try:
            self._engine.catalogue.add(storage.published.model_spec(published, replace_head))
            await self._engine.deployments.load(model_id)
        except BaseException:
            await self._take_back(storage.published, published)
            raise

    async def _take_back(self, store: PublishedStore, model: PublishedModel) -> None:
        """Remove a new model that cannot be hosted: its id is free again, and no restart lists it."""
        try:
            if self._lists(model):
                self._engine.catalogue.remove(model.model_id)
            await asyncio.to_thread(store.remove, model.model_id)
        except ServiceError as error:  # its owner has removed it meanwhile, or the disk fails
            _log.warning("model that is not hosted not removed", model_id=model.model_id, why=error.message)

    def _lists(self, model: PublishedModel) -> bool:
        """Whether the catalogue has this model: the operator may have reused its id for another one since."""
        hosted = (entry.spec for entry in self._engine.catalogue.entries())
        own = (model.model_id, model.weights_file)
        return any((spec.model_id, Path(spec.weights).name) == own for spec in hosted)

    async def remove(self, principal: str, model_id: str, needed: Collection[str]) -> None:
        """Remove a model, from disk first: once this returns, no restart brings it back.

        Args:
            principal: The caller; other principals' models are reported as unknown.
            model_id: The model to remove.
            needed: Models in use by trainers.

        Raises:
            ServiceError: `UNKNOWN_MODEL`; `MODEL_CONFLICT`, it is in use; `STORAGE_UNAVAILABLE`.
        """
        storage = await asyncio.to_thread(self._storage.existing)
        published = [] if storage is None else await asyncio.to_thread(storage.published.entries)
        own = [model for model in published if (model.model_id, model.principal) == (model_id, principal)]
        if storage is None or not own:
            raise ServiceError(ErrorReason.UNKNOWN_MODEL, f"you have published no model '{model_id[:80]}'")
        if model_id in needed:
            raise ServiceError(
                ErrorReason.MODEL_CONFLICT, f"a trainer needs model '{model_id}'; close the trainer first"
            )
        await shielded(self._remove(storage.published, own[0]))

    async def _remove(self, store: PublishedStore, model: PublishedModel) -> None:
        await asyncio.to_thread(store.remove, model.model_id)
        if self._lists(model):
            await self._engine.deployments.unload(model.model_id)
            self._engine.catalogue.remove(model.model_id)


def _taken(model_id: str) -> ServiceError:
    return ServiceError(ErrorReason.MODEL_CONFLICT, f"model '{model_id[:80]}' exists; choose another id")


def check_categories(categories: Sequence[str], counts: Collection[int]) -> None:
    """Refuse class names that do not match the model's outputs one to one.

    Args:
        categories: Class names by index; an empty list fits every model.
        counts: The numbers of classes that it may have, see `class_counts`; it is known if there is one.

    Raises:
        ServiceError: `INVALID_ARGUMENT`.
    """
    if categories and len(counts) == 1 and len(categories) not in counts:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT,
            f"categories: {len(categories)} names for a model with {next(iter(counts))} outputs; give one "
            "for each, or none",
        )
