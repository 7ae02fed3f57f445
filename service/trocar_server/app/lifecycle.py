"""Server lifecycle for operators: drain and configuration reload."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trocar_api.reasons import ErrorReason
from trocar_server.app.access import authorizer_of
from trocar_server.app.features import features
from trocar_server.app.reloading import Reload
from trocar_server.app.server_id import ServerId
from trocar_server.config import ServerConfig
from trocar_server.engine.engine import Engine
from trocar_server.errors import ServiceError
from trocar_server.rpc.call.authorization import ReplaceableAuthorizer
from trocar_server.rpc.call.drain import DrainSwitch
from trocar_server.rpc.server import RpcServer
from trocar_server.rpc.services.operator import DrainState, Feature
from trocar_server.tasks import shielded
from trocar_server.training.datasets import DatasetLibrary
from trocar_server.training.fit.fitting import Fits
from trocar_server.training.trainers import Trainers


@dataclass
class Lifecycle:
    """Drains a server and reloads its configuration; see `rpc.services.operator.Operator`.

    Attributes:
        own_id: The id of its data directory.
        config: The active configuration.
        reread: Reads the configuration again; None without a configuration file, as in a local server.
        traces_off: See `Telemetry`.
        rpc: Set when the server listens.
        drain_switch: Drain state, which decides whether calls are accepted.
    """

    own_id: ServerId
    config: ServerConfig
    data_dir: Path
    engine: Engine
    datasets: DatasetLibrary
    trainers: Trainers
    fits: Fits
    authorizer: ReplaceableAuthorizer
    log: Any
    reread: Callable[[], ServerConfig] | None = None
    traces_off: str = ""
    rpc: RpcServer | None = None
    refused_replica: str | None = None
    """Why the last replica of the model that differed was refused; empty if none was, None off a cluster."""
    drain_switch: DrainSwitch = field(default_factory=DrainSwitch)
    _is_loaded: bool = False
    _checking: "asyncio.Task[None] | None" = None
    _draining: asyncio.Lock = field(default_factory=asyncio.Lock)
    _reloading: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Apart from drains: a reload may load models for minutes."""

    def begin(self, rpc: RpcServer) -> None:
        """Start supervision of a listening server: calls end when their caller loses authorization."""
        self.rpc = rpc
        self._checking = asyncio.create_task(rpc.running.keep_checking())

    def stop(self) -> None:
        """Stop supervision."""
        if self._checking is not None:
            self._checking.cancel()

    @property
    def server_id(self) -> str:
        """The id of the data directory."""
        return self.own_id.value

    def features(self) -> Sequence[Feature]:
        """The server's features, with the reason for each that is off."""
        own = features(self.config, self.engine, self.trainers, self.own_id, self.traces_off)
        is_of_cluster = self.refused_replica is not None
        return [*own, Feature("replicas", self.refused_replica or "")] if is_of_cluster else own

    @property
    def is_draining(self) -> bool:
        """Whether new work is refused."""
        return self.drain_switch.is_draining

    async def drain(self, is_wanted: bool | None) -> DrainState:
        """Start draining, accept work again, or do neither (None); returns the drain state."""
        async with self._draining:  # also to look: a drain counts fits before it has saved them
            if is_wanted is not None:
                await shielded(self._drain(is_wanted))
            running = self.rpc.running.work_count if self.rpc else 0
            return DrainState(self.drain_switch.is_draining, running, self.fits.held_count)

    async def _drain(self, is_wanted: bool) -> None:
        """Drain or accept work again. A repeated drain saves the fits that could not be saved before."""
        if is_wanted != self.drain_switch.is_draining:
            self.drain_switch.is_draining = is_wanted
            self.log.info("runs empty" if is_wanted else "accepts work again")
            await self._set_health()
        if is_wanted:
            await self.fits.hold_all()
        else:
            self.fits.let_go_on()

    async def set_loaded(self) -> None:
        """Report SERVING from now on, except while the server drains."""
        self._is_loaded = True
        await self._set_health()

    async def identify(self, replica_id: str) -> None:
        """Serve a service of health checks that only this replica of a cluster has."""
        if self.rpc is not None:
            self.rpc.replica_id = replica_id
        await self._set_health()

    async def reload(self) -> Sequence[str]:
        """Reload the configuration; returns the changes.

        Raises:
            ServiceError: The configuration is invalid; nothing has changed.
        """
        if self.reread is None:
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT,
                "this server has no configuration file to reload; it was started from flags or Python",
            )
        async with self._reloading:
            try:
                return await self._reload(self.reread)
            except ServiceError as error:
                self.log.error("reload failed: the old configuration stays in effect", problem=error.message)
                raise

    async def _reload(self, reread: Callable[[], ServerConfig]) -> list[str]:
        new = await asyncio.to_thread(reread)
        authorizer = authorizer_of(new, self.data_dir, self.log)
        reload = Reload(self.config, new, self.engine, self.datasets)
        prepared = await reload.prepare()
        # All at once, before anything that may be cancelled.
        changes = reload.apply(prepared)
        self.authorizer.replace(authorizer)
        self.config = new
        self.log.info("configuration reloaded", changes="; ".join(changes) or "none")
        if retried := await reload.retry_failed():
            self.log.info("failed models retried", result="; ".join(retried))
        return [*changes, *retried]

    async def _set_health(self) -> None:
        if self.rpc is not None:
            await self.rpc.set_serving(self._is_loaded and not self.drain_switch.is_draining)
