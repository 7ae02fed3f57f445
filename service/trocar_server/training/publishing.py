"""Weights of trainers as models of the catalogue: at once, and again at every start of the server."""

import asyncio
from functools import partial

import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.engine.engine import Engine
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel
from trocar_server.training.head import replace_head
from trocar_server.training.snapshots import snapshot_state_dict
from trocar_server.training.storage import TrainingStorage
from trocar_server.training.trainer import Trainer
from trocar_server.training.trainer_store import TRAINER_ID

_log = structlog.get_logger("trocar")


async def host_published(engine: Engine, storage: TrainingStorage) -> None:
    """Host what was published; what cannot be hosted is logged, and stays on disk."""
    for model in await asyncio.to_thread(storage.published.entries):
        try:
            engine.catalogue.add(storage.published.model_spec(model, replace_head))
            await engine.load(model.model_id)
        except ServiceError as error:
            _log.warning("published model not hosted", model_id=model.model_id, why=error.message)


async def publish(trainer: Trainer, base: HostedModel, model_id: str, categories: tuple[str, ...]) -> None:
    """Make a copy of a trainer's weights a model of the catalogue.

    Args:
        trainer: Whose weights.
        base: The model that it began with.
        model_id: Of the new model.
        categories: Class names by index; the trainer's own when empty.

    Raises:
        ServiceError: `MODEL_CONFLICT`, there is a model of this id; `MODEL_INVALID`, the id is none, or looks
            like a trainer's; `STORAGE_FULL`, `STORAGE_UNAVAILABLE`.
    """
    engine = trainer.engine
    if TRAINER_ID.fullmatch(model_id):  # one may exist that the caller must not know of
        raise ServiceError(
            ErrorReason.MODEL_INVALID, "32 hexadecimal digits are the id of a trainer; take another id"
        )
    if model_id in {entry.spec.model_id for entry in engine.catalogue.entries()}:
        raise ServiceError(
            ErrorReason.MODEL_CONFLICT, f"there is a model '{model_id[:80]}' already; take another id"
        )
    published = (await asyncio.to_thread(trainer.storage.get)).published
    hosted, head = trainer.core.hosted, trainer.spec.head
    async with trainer.numbering.at_rest():
        weights = await engine.owner.run(lambda: snapshot_state_dict(hosted.module))
    write = partial(
        published.publish,
        model_id,
        trainer.principal,
        base,
        weights,
        heads=() if head is None else (head,),
        categories=categories or hosted.categories,
    )
    model = await asyncio.to_thread(write)
    engine.catalogue.add(published.model_spec(model, replace_head))
    await engine.load(model_id)
