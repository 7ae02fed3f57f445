"""Event logs of a server's trainers, one file each."""

import asyncio
from collections.abc import Collection
from pathlib import Path

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.storage.disk_errors import disk_errors
from trocar_server.storage.durable import remove_partial, remove_quietly
from trocar_server.training.files.event_log import EventLog
from trocar_server.training.files.trainer_janitor import EVENTS_NAME, TRAINER_ID
from trocar_server.training.files.trainer_store import moved


class EventLogs:
    """Opens logs on demand. Belongs to one event loop.

    Args:
        folder: Folder of the logs.
        is_shared: Whether it is that of trainers which other servers may take over: then each log is in the
            folder of its trainer, and moves with it.
    """

    def __init__(self, folder: Path, *, is_shared: bool = False) -> None:
        self._folder, self._is_shared = folder, is_shared
        self._logs: dict[str, EventLog] = {}
        self._opening = asyncio.Lock()

    async def of(self, trainer_id: str) -> EventLog:
        """Return the log of a trainer.

        Raises:
            ServiceError: `STORAGE_FULL`, `STORAGE_UNAVAILABLE`.
        """
        async with self._opening:
            if trainer_id not in self._logs:
                log = EventLog(self._path(trainer_id))
                await asyncio.to_thread(self._load, log)
                self._logs[trainer_id] = log
            return self._logs[trainer_id]

    async def forget(self, trainer_id: str) -> None:
        """Delete the log of a trainer that is being closed; its watches end with an error."""
        log = self._logs.pop(trainer_id, None)
        if log is not None:
            await log.close(ServiceError(ErrorReason.UNKNOWN_TRAINER, "the trainer was closed"))
        await asyncio.to_thread(remove_quietly, self._path(trainer_id))

    async def let_go(self, trainer_id: str) -> None:
        """End the watches of a trainer that another server has taken over; its log is there."""
        log = self._logs.pop(trainer_id, None)
        if log is not None:
            await log.close(moved())

    async def clean(self, trainer_ids: Collection[str]) -> None:
        """Delete the logs of all but these trainers, left by killed servers."""
        await asyncio.to_thread(self._clean, trainer_ids)

    async def close(self) -> None:
        """End all watches."""
        for log in self._logs.values():
            await log.close()

    def _load(self, log: EventLog) -> None:
        with disk_errors("list of events"):
            if not self._is_shared:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            log.load()

    def _clean(self, trainer_ids: Collection[str]) -> None:
        if self._is_shared:
            return  # they are deleted with their trainers
        remove_partial(self._folder)
        for path in self._folder.glob("*.jsonl"):
            if TRAINER_ID.fullmatch(path.stem) and path.stem not in trainer_ids:
                remove_quietly(path)

    def _path(self, trainer_id: str) -> Path:
        if self._is_shared:
            return self._folder / trainer_id / EVENTS_NAME
        return self._folder / f"{trainer_id}.jsonl"
