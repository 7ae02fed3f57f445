"""Two servers that share trainers, behind a gateway: all in one loop, without Ray and without sockets.

async with cluster(tmp_path) as nodes:
    await nodes.door.ask("TrainerService/Train", *messages)      # through the gateway
    await nodes.lose("a")                                       # goes on, unseen; b takes its trainers
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from tests.orders.trainer_calls import SETTINGS
from tests.orders.world import trainer_state
from tests.support.orders.door_channels import DoorChannels
from tests.support.orders.doorway import Door
from tests.support.orders.stepped_server import SteppedServer, stepped_server
from trocar_server.cluster.gateway import Gateway
from trocar_server.cluster.routing import ReplicaTable
from trocar_server.training.files.owner_folders import OwnerFolders

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

KEY = "k" * 32
HOLD_S = 2.0


def report(name: str) -> dict[str, Any]:
    addresses = {"address": name, "client_address": name, "metrics_address": ""}
    load = {"waiting_s": 0.0, "call_count": 0, "is_draining": False}
    return {"replica_id": name, "model_id": "tiny", "slot": str("ab".index(name)), **addresses, **load}


class Nodes:
    """The servers and the gateway."""

    def __init__(self, servers: dict[str, SteppedServer], folder: Path) -> None:
        self.servers, self._folder = servers, folder
        self.channels = DoorChannels({name: server.door for name, server in servers.items()})
        channels: Any = self.channels
        self.gateway = Gateway(ReplicaTable(), hold_s=HOLD_S, key=KEY, channels=channels)
        self.door = Door()
        self.door.add_generic_rpc_handlers([self.gateway.handler()])
        self.lost: set[str] = set()
        self._tell()

    def _tell(self) -> None:
        reports = [report(name) for name in self.servers if name not in self.lost]
        self.gateway.update(reports, {"tiny": 1})

    async def lose(self, name: str) -> None:
        """Lose a server, which goes on, and let the other one take its trainers."""
        self.lost.add(name)
        self.channels.at(name).lose()
        await self._take_over(name)

    async def stop(self, name: str) -> None:
        """Stop a server, and let the other one take its trainers."""
        self.lost.add(name)
        await self.servers[name].stop()
        self.channels.at(name).lose()
        await self._take_over(name)

    async def _take_over(self, name: str) -> None:
        (other,) = self.servers.keys() - {name}
        folders = OwnerFolders(self._folder / "owners", other)
        for trainer_id in await asyncio.to_thread(folders.trainer_ids, name):
            await self.servers[other].app.trainers.take_over(name, trainer_id)
        self._tell()

    async def look_again(self) -> None:
        """Take what lost servers, which go on, have created since: a takeover looks again, too."""
        for name in self.lost:
            await self._take_over(name)

    async def trainers(self) -> list[tuple[Any, ...]]:
        """Return the states of the trainers of the servers that are not lost."""
        found = [
            await trainer_state(trainer)
            for name, server in self.servers.items()
            if name not in self.lost
            for trainer in server.app.trainers.all()
        ]
        return sorted(found)


@asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[Nodes]:
    """Start two servers and their gateway."""
    async with _server(folder, "a") as first, _server(folder, "b") as second:
        yield Nodes({"a": first, "b": second}, folder)


def _server(folder: Path, name: str) -> Any:
    owners = OwnerFolders(folder / "owners", name)
    return stepped_server(folder / f"data-{name}", owners=owners, gateway_key=KEY, **SETTINGS)
