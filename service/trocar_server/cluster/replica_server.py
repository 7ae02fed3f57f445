"""Replica server: a complete Trocar server as a child process of a replica of Ray Serve.

It serves one model on a free port, reports its load four times a second, and stops when its input ends: new
work is refused, running calls end, then trainers and fits are saved. See `app.serve` for the rest.
"""

import asyncio
import gc
import os
import signal
from pathlib import Path
from typing import Any

import structlog

from trocar_server.app.log_format import set_up_logging
from trocar_server.app.quick_imports import without_dynamo
from trocar_server.cluster.lines import ParentLines
from trocar_server.cluster.published_models import PublishedModels
from trocar_server.cluster.ranks.rank_requests import RankRequests
from trocar_server.config import ServerConfig
from trocar_server.engine.schedule.allocator import keep_freed_memory, use_huge_pages
from trocar_server.errors import ServiceError
from trocar_server.rpc.call.forwarded import GatewayAccess
from trocar_server.storage.data_lock import FolderLock, lock_folder
from trocar_server.storage.folder_lease import Holder, take_lease

REPORT_EVERY_S = 0.25
_MOST_SLOTS = 4096
_TAKE_EVERY_S = 2.0
"""How often a replica looks for published models of others that have ended."""
_log = structlog.get_logger("trocar")


def main() -> None:
    """Read the settings, serve until the input ends."""
    lines = ParentLines()
    settings = lines.read()
    if settings is None:
        return
    gc.disable()  # until `app.serve`, as in `trocar serve`
    keep_freed_memory()
    use_huge_pages()
    config = own_config(settings)
    set_up_logging(config.log_format)
    try:
        for folder in config.cluster_folders if "holder" in settings else ():
            take_lease(folder, Holder(**settings["holder"]))  # until this process ends
        slot, lock = take_slot(config.data_dir.expanduser() / "replicas" / settings["model_id"])
        asyncio.run(_Serving(lines, config, slot, settings).serve())
        lock.release()
    except ServiceError as error:
        lines.write(problem=error.message)
        raise SystemExit(1) from None


def own_config(settings: dict[str, Any]) -> ServerConfig:
    """Return the configuration of a replica; models that only the environment names are other replicas'."""
    config, model_id = ServerConfig(**settings["config"]), settings["model_id"]
    return config.model_copy(update={"models": {model_id: config.models[model_id]}})


def take_slot(folder: Path) -> tuple[Path, FolderLock]:
    """Lock the first free state folder of a model's replicas: `FOLDER/0`, `FOLDER/1`, ...

    The lock of a process ends with it, however it ends.

    Raises:
        ServiceError: `STORAGE_UNAVAILABLE`, the folder cannot be written.
    """
    for number in range(_MOST_SLOTS):
        try:
            return folder / str(number), lock_folder(folder / str(number))
        except ServiceError as error:
            if "process" not in error.details or number == _MOST_SLOTS - 1:
                raise
    raise AssertionError


class _Serving:
    """The server, its reports and its end."""

    def __init__(
        self, lines: ParentLines, config: ServerConfig, slot: Path, settings: dict[str, Any]
    ) -> None:
        self._lines, self._config, self._slot = lines, config, slot
        self._replica_id, self._drain_s = settings["replica_id"], settings["drain_s"]
        self._configured = tuple(settings["config"]["models"])
        self._gateway = GatewayAccess(config.host if config.tls_cert else "", settings["key"])
        self._model_id = settings["model_id"]
        self._trainers_dir = config.cluster_folders[1] / self._model_id / "trainers"
        self._has_joined = False
        self._ranks = RankRequests(lines, slot)
        self._tasks: list[asyncio.Task[None]] = []

    async def serve(self) -> None:
        """Serve until the input has ended and the calls have."""
        with without_dynamo():
            from trocar_server.app import app
            from trocar_server.app.assembly import ReplicaSetup
            from trocar_server.training.files.owner_folders import OwnerFolders
            from trocar_server.training.fit.ranks.placed_ranks import PlacedLauncher

        setup = ReplicaSetup(
            own_dir=self._slot,
            gateway=self._gateway,
            owners=OwnerFolders(self._trainers_dir, self._replica_id),
            published=PublishedModels(self._slot, self._configured),
            launcher=PlacedLauncher(self._ranks, self._config.host),
        )
        await app.serve(self._config, self._begin, setup=setup)

    def _begin(self, running: Any) -> None:
        self._tasks = [
            asyncio.create_task(self._tell_identity(running)),
            asyncio.create_task(running.lifecycle.identify(self._replica_id)),
            asyncio.create_task(self._report(running)),
            asyncio.create_task(self._take_published(running)),
            asyncio.create_task(self._wait_for_end(running)),
        ]

    async def _tell_identity(self, running: Any) -> None:
        """Tell the parent that this replica is ready, and by what it is compared with the others."""
        from trocar_server.engine.host.replica_identity import replica_identity

        rpc, engine = running.rpc, running.engine
        deployment = engine.deployments.find(self._model_id)
        identity = await replica_identity(deployment, await engine.identity(deployment), engine.owner)
        self._lines.write(
            ready=rpc.plain_address or rpc.address,
            client_address=rpc.address,
            slot=self._slot.name,
            process_id=os.getpid(),
            metrics_address=self._metrics_address(running),
            identity=identity,
        )

    def _metrics_address(self, running: Any) -> str:
        """Where the metrics are; empty if they are off."""
        port = running.telemetry.metrics_port
        return f"{self._config.metrics_host}:{port}" if port else ""

    async def _report(self, running: Any) -> None:
        while True:
            _, waiting_s, call_count = running.engine.admission.reserved()
            draining = running.lifecycle.drain_switch.is_draining
            self._lines.write(waiting_s=waiting_s, call_count=call_count, is_draining=draining)
            await asyncio.sleep(REPORT_EVERY_S)

    async def _take_published(self, running: Any) -> None:
        while True:
            await asyncio.sleep(_TAKE_EVERY_S)
            if running.lifecycle.drain_switch.is_draining or not self._has_joined:
                continue
            try:
                await running.trainers.publishing.take_lost()
            except ServiceError as error:
                _log.warning("published models not taken over", why=error.message)

    async def _wait_for_end(self, running: Any) -> None:
        """Take what the parent tells; drain and stop when it closes our input, or has died.

        The replicas that accept work share the limits of a caller.
        """
        while (line := await asyncio.to_thread(self._lines.read)) is not None:
            self._ranks.take(line)
            if "replicas" in line:  # by which the cluster has this one
                self._has_joined = True
                running.lifecycle.refused_replica = line.get("refused", "")
                running.takeover.tell(line["replicas"])
                running.engine.admission.sharers = max(1, sum(line["replicas"].values()))
        await running.lifecycle.drain(True)
        self._lines.write(is_draining=True)
        try:
            async with asyncio.timeout(self._drain_s):
                while running.rpc.running.work_count:  # noqa: ASYNC110 - it counts calls, it tells nobody
                    await asyncio.sleep(REPORT_EVERY_S / 5)
        except TimeoutError:
            pass
        os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
