"""Models that come out of trainers: written, hosted, removed. Belongs to one event loop."""

import asyncio
from collections.abc import Collection
from functools import partial
from pathlib import Path

import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.engine.engine import Engine
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel
from trocar_server.training.head import replace_head
from trocar_server.training.snapshots import snapshot_state_dict
from trocar_server.training.storage import StorageOnDemand, TrainingStorage
from trocar_server.training.trainer import Trainer
from trocar_server.training.trainer_store import TRAINER_ID

_log = structlog.get_logger("trocar")


class Publishing:
    """Published models, on disk and in the catalogue.

    Args:
        engine: Hosts them.
        storage: Where they are kept.
    """

    def __init__(self, engine: Engine, storage: StorageOnDemand) -> None:
        self._engine = engine
        self._storage = storage

    async def host_all(self, storage: TrainingStorage) -> None:
        """Host what was published before; what cannot be hosted is logged, and stays on disk."""
        for model in await asyncio.to_thread(storage.published.entries):
            try:
                self._engine.catalogue.add(storage.published.model_spec(model, replace_head))
                await self._engine.load(model.model_id)
            except ServiceError as error:
                _log.warning("published model not hosted", model_id=model.model_id, why=error.message)

    async def publish(
        self, trainer: Trainer, base: HostedModel, model_id: str, categories: tuple[str, ...]
    ) -> None:
        """Make a copy of a trainer's weights a model of the catalogue, at once and after restarts.

        Args:
            trainer: Whose weights; averages where it has any.
            base: The model that it began with.
            model_id: The new model's id.
            categories: Class names by index; the trainer's own when empty.

        Raises:
            ServiceError: `MODEL_CONFLICT`, there is a model of this id; `MODEL_INVALID`, the id is none.
        """
        if TRAINER_ID.fullmatch(model_id):  # one may exist that the caller must not know of
            raise ServiceError(
                ErrorReason.MODEL_INVALID, "32 hexadecimal digits are the id of a trainer; take another id"
            )
        if model_id in {entry.spec.model_id for entry in self._engine.catalogue.entries()}:
            raise ServiceError(
                ErrorReason.MODEL_CONFLICT, f"there is a model '{model_id[:80]}' already; take another id"
            )
        storage = await asyncio.to_thread(self._storage.get)
        hosted, head = trainer.core.hosted, trainer.spec.head
        async with trainer.numbering.at_rest():
            weights = await self._engine.owner.run(lambda: snapshot_state_dict(hosted.module))
        write = partial(
            storage.published.publish,
            model_id,
            trainer.principal,
            base,
            weights,
            heads=() if head is None else (head,),
            categories=categories or hosted.categories,
        )
        published = await asyncio.to_thread(write)
        self._engine.catalogue.add(storage.published.model_spec(published, replace_head))
        await self._engine.load(model_id)

    async def remove(self, principal: str, model_id: str, needed: Collection[str]) -> None:
        """Remove a model, from disk first: when this returns it does not come back.

        Args:
            principal: Who asks; others' models read as absent.
            model_id: Which.
            needed: Models that trainers need.

        Raises:
            ServiceError: `UNKNOWN_MODEL`; `MODEL_CONFLICT`, it is needed; `STORAGE_UNAVAILABLE`.
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
        await asyncio.to_thread(storage.published.remove, model_id)
        hosted = [entry.spec for entry in self._engine.catalogue.entries()]
        weights_file = own[0].weights_file  # the operator may have given the id to another model since
        if any(spec.model_id == model_id and Path(spec.weights).name == weights_file for spec in hosted):
            await self._engine.unload(model_id)
            self._engine.catalogue.remove(model_id)
