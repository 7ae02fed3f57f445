"""Takeover of trainers whose server was lost, by the other servers of the cluster.

    takeover = Takeover(folders, trainers)
    takeover.tell({"replica-b": True})          # which servers there are now, by Ray's own word

One server takes each trainer: the one with the highest hash of both names, among those that accept work. That
a server counts as gone by mistake, or that two disagree, does no harm, see Note: [Fence by removal].
"""

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import structlog

from trocar_server.errors import ServiceError
from trocar_server.late_imports import import_compiler
from trocar_server.training.files.owner_folders import OwnerFolders
from trocar_server.training.trainers import Trainers

GONE_AFTER_S = 2.0
"""Seconds for which a server is missing in every list until it counts as gone."""
_log = structlog.get_logger("trocar")


class Takeover:
    """Looks for trainers of lost servers. Belongs to one event loop.

    Args:
        folders: The folders of all servers' trainers.
        trainers: This server's trainers.
        gone_after_s: Seconds for which a server is missing in every list until it counts as gone.
        clock: Returns seconds.
    """

    def __init__(
        self,
        folders: OwnerFolders,
        trainers: Trainers,
        gone_after_s: float = GONE_AFTER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folders, self._trainers = folders, trainers
        self._gone_after_s, self._clock = gone_after_s, clock
        self._servers: Mapping[str, bool] = {}
        self._missing_since: dict[str, float] = {}
        self._cut_off: set[str] = set()
        """Trainers of which only some files are here, as the disk failed."""
        self._told = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look whenever the servers are told, until `stop`."""
        self._running = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End; a trainer that is being moved is moved first."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    def tell(self, servers: Mapping[str, bool]) -> None:
        """Take the list of the servers that are there.

        Args:
            servers: By name, whether each accepts new work.
        """
        self._servers = servers
        self._told.set()

    async def look(self) -> None:
        """Drop own trainers that others have taken, and take those that are this server's to take.

        Raises:
            ServiceError: The first failure; all that it did not concern was taken.
        """
        await self._trainers.drop_moved()
        failures: list[ServiceError] = []
        for trainer_id in list(self._cut_off):
            with _noted(failures):
                await self._take(self._folders.own.name, trainer_id)
        owners = await asyncio.to_thread(self._others)
        now = self._clock()
        self._missing_since = {
            owner: self._missing_since.get(owner, now) for owner in owners if owner not in self._servers
        }
        for owner, since in self._missing_since.items():
            if now - since >= self._gone_after_s:
                with _noted(failures):
                    await self._take_from(owner, failures)
        if failures:
            raise failures[0]

    def _others(self) -> list[str]:
        """Return the other owners; import what their trainers need, if there are any, before one is lost."""
        owners = self._folders.others()
        if any(self._folders.trainer_ids(owner) for owner in owners):
            import_compiler()
        return owners

    async def _take_from(self, owner: str, failures: list[ServiceError]) -> None:
        for trainer_id in await asyncio.to_thread(self._folders.trainer_ids, owner):
            if self._is_chosen(trainer_id):
                with _noted(failures):
                    await self._take(owner, trainer_id)
        await asyncio.to_thread(self._folders.forget, owner)

    async def _take(self, owner: str, trainer_id: str) -> None:
        self._cut_off.add(trainer_id)
        await self._trainers.take_over(owner, trainer_id)
        self._cut_off.discard(trainer_id)

    def _is_chosen(self, trainer_id: str) -> bool:
        working = [name for name, is_working in self._servers.items() if is_working]
        chosen = max(
            working, key=lambda name: hashlib.sha256(f"{name} {trainer_id}".encode()).digest(), default=""
        )
        return chosen == self._folders.own.name

    async def _run(self) -> None:
        while True:
            await self._told.wait()
            self._told.clear()
            try:
                await self.look()
            except ServiceError as error:
                _log.warning("lost trainers not taken over", reason=error.reason, why=error.message)
                with suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.Event().wait(), self._gone_after_s)


@contextmanager
def _noted(failures: list[ServiceError]) -> Iterator[None]:
    """Note a failure inside the context, so that one trainer or owner does not keep the others."""
    try:
        yield
    except ServiceError as error:
        failures.append(error)
