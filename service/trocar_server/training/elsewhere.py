"""Trainers of the other servers of a cluster, by their folders."""

import asyncio

from trocar_server.training.files.owner_folders import OwnerFolders
from trocar_server.training.files.trainer_store import moved


class Elsewhere:
    """Looks in the folders of all servers whether a trainer is another one's.

    Args:
        folders: The folders.
    """

    def __init__(self, folders: OwnerFolders) -> None:
        self._folders = folders

    async def is_here(self, trainer_id: str) -> bool:
        """Whether this server has the trainer's folder; False where no server has one.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`, with a detail: another server has it, gone or not, and a gateway
                finds or awaits it. Or `STORAGE_UNAVAILABLE`.
        """
        owner = await asyncio.to_thread(self._folders.owner_of, trainer_id)
        if owner is not None and owner != self._folders.own.name:
            raise moved()
        return owner is not None

    async def count(self, principal: str, request_id: str) -> int:
        """Return the number of a principal's trainers at other servers.

        Args:
            principal: The caller.
            request_id: Of the request for a new trainer; any when empty.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`, with a detail: the request has made a trainer at another server,
                gone or not. Or `STORAGE_UNAVAILABLE`.
        """
        records = await asyncio.to_thread(self._folders.records_elsewhere)
        own = [record for record in records if record.principal == principal]
        if request_id and any(record.facts.get("request_id") == request_id for record in own):
            raise moved()
        return len(own)
