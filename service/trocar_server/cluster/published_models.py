"""Published models of a cluster: an id is published once, and no model is lost with its replica."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, busy
from trocar_server.storage.data_lock import FolderLock, lock_folder
from trocar_server.storage.disk_errors import disk_errors
from trocar_server.training.files.trainer_janitor import MODEL_NAME

if TYPE_CHECKING:
    from trocar_server.training.files.published import PublishedStore
    from trocar_server.training.publishing import Take

_AGAIN_S = 0.05
_CLAIM_WITHIN_S = 60.0


class PublishedModels:
    """Published models of the other replicas.

    Args:
        slot: This replica's state folder, `REPLICAS/MODEL/NUMBER`; all nodes share `REPLICAS`.
        configured: Ids of the models of the cluster's configuration.
    """

    def __init__(self, slot: Path, configured: Collection[str]) -> None:
        self._slot = slot
        self._configured = configured
        self._taking = asyncio.Lock()

    async def take_lost(self, take: "Take") -> None:
        """Take the models that replicas of this model published whose processes have ended.

        The lock of a folder tells that its process has. A replica that starts meanwhile takes another folder.

        Args:
            take: Moves the models of a folder here, and hosts them.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`.
        """
        async with self._taking:  # who comes second finds what the first one took
            for other in await asyncio.to_thread(self._with_published):
                try:
                    lock = await asyncio.to_thread(lock_folder, other)
                except ServiceError:  # it runs, or another replica does this
                    continue
                try:
                    await take(other / "published")
                finally:
                    lock.release()

    @asynccontextmanager
    async def claim(self, model_id: str) -> "AsyncIterator[PublishedStore | None]":
        """Keep all others from publishing; yields the store of the one that has this id, if any has.

        Raises:
            ServiceError: `MODEL_CONFLICT`, the configuration has a model of this id; `SERVER_BUSY`, another
                replica was publishing all the time; `STORAGE_UNAVAILABLE`.
        """
        if model_id in self._configured:
            raise ServiceError(
                ErrorReason.MODEL_CONFLICT,
                f"model '{model_id}' is one of the cluster's own; choose another id",
            )
        lock = await self._locked(self._slot.parent.parent.parent / "publishing")
        try:
            yield await asyncio.to_thread(self._store_with, model_id)
        finally:
            lock.release()

    async def _locked(self, folder: Path) -> FolderLock:
        """Lock a folder when its holder, who writes a model, has released it."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + _CLAIM_WITHIN_S
        while True:
            try:
                return await asyncio.to_thread(lock_folder, folder)
            except ServiceError as error:
                if "process" not in error.details:
                    raise
                if loop.time() > give_up:
                    raise busy("another replica is publishing a model; try again later", None) from None
            await asyncio.sleep(_AGAIN_S)

    def _store_with(self, model_id: str) -> "PublishedStore | None":
        from trocar_server.training.files.trainer_storage import published_store

        with disk_errors("published models of other replicas"):
            for other in self._slot.parent.parent.glob(f"*/*/published/{model_id}/{MODEL_NAME}"):
                slot = other.parent.parent.parent
                if slot != self._slot:
                    return published_store(slot)
        return None

    def _with_published(self) -> list[Path]:
        """Return the state folders of other replicas of this model that have published models."""
        with disk_errors("published models of other replicas"):
            others = [path for path in self._slot.parent.iterdir() if path.name.isdecimal()]
            return [
                path
                for path in sorted(others)
                if path != self._slot and any(path.glob(f"published/*/{MODEL_NAME}"))
            ]
