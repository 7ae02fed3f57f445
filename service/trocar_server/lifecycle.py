"""What the operator does with a running server: run it empty, and change its configuration."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trocar_api.reasons import ErrorReason
from trocar_server.access import gate_of
from trocar_server.config import ServerConfig
from trocar_server.engine.engine import Engine
from trocar_server.errors import ServiceError
from trocar_server.reloading import Reload
from trocar_server.rpc.doors import Doors
from trocar_server.rpc.gates import ReplaceableGate
from trocar_server.rpc.operator import DrainState
from trocar_server.rpc.server import RpcServer
from trocar_server.training.datasets import DatasetLibrary
from trocar_server.training.fitting import Fits


@dataclass
class Lifecycle:
    """Drains a server and reloads its configuration; see `rpc.operator.Operator`.

    Attributes:
        server_id: The id of its data directory.
        config: What is in force.
        reread: Reads the configuration again; None where there is nothing to read, as in a local server.
        rpc: Set when the server listens.
        doors: Say which calls are let in.
    """

    server_id: str
    config: ServerConfig
    data_dir: Path
    engine: Engine
    datasets: DatasetLibrary
    fits: Fits
    gate: ReplaceableGate
    log: Any
    reread: Callable[[], ServerConfig] | None = None
    rpc: RpcServer | None = None
    doors: Doors = field(default_factory=Doors)
    _checking: "asyncio.Task[None] | None" = None
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    def begin(self, rpc: RpcServer) -> None:
        """Look after a server that listens: its running calls end with the rights of their callers."""
        self.rpc = rpc
        self._checking = asyncio.create_task(rpc.running.keep_checking())

    def stop(self) -> None:
        """Look after it no longer."""
        if self._checking is not None:
            self._checking.cancel()

    @property
    def is_draining(self) -> bool:
        """Whether new work is refused."""
        return self.doors.is_draining

    async def drain(self, is_wanted: bool | None) -> DrainState:
        """Run empty, take work again, or do neither (None); returns how it stands now."""
        async with self._one_at_a_time:
            if is_wanted is not None and is_wanted != self.doors.is_draining:
                self.doors.is_draining = is_wanted
                self.log.info("runs empty" if is_wanted else "takes work again")
                await self._tell_health()
                if is_wanted:
                    await self.fits.hold_all()
                else:
                    self.fits.let_go_on()
            running = self.rpc.running.work_count if self.rpc else 0
            return DrainState(self.doors.is_draining, running, self.fits.held_count)

    async def reload(self) -> Sequence[str]:
        """Read the configuration again; returns what has changed.

        Raises:
            ServiceError: What is wrong with it; nothing has changed.
        """
        if self.reread is None:
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT, "this server was not started with a configuration to read again"
            )
        async with self._one_at_a_time:
            try:
                changes = await self._reload(self.reread)
            except ServiceError as error:
                self.log.error("the old configuration stays in force", problem=error.message)
                raise
            self.log.info("configuration read again", changes="; ".join(changes) or "none")
            return changes

    async def _reload(self, reread: Callable[[], ServerConfig]) -> list[str]:
        new = await asyncio.to_thread(reread)
        gate = gate_of(new, self.data_dir, self.log)
        changes = await Reload(self.config, new, self.engine, self.datasets).apply()
        self.gate.current, self.config = gate, new
        return changes

    async def _tell_health(self) -> None:
        if self.rpc is not None:
            await self.rpc.set_serving(not self.doors.is_draining)
