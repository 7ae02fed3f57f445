"""The server as a whole: configuration in, a running process out."""

import asyncio
import gc
import signal
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from trocar_server.access import check_address, credentials_of, gate_of
from trocar_server.config import ServerConfig
from trocar_server.edit_store import EditStore
from trocar_server.engine.device import DeviceThread, choose_device
from trocar_server.engine.engine import Engine
from trocar_server.engine.transfer import transfers_of
from trocar_server.engines import form_folder
from trocar_server.errors import ServiceError
from trocar_server.lifecycle import Lifecycle
from trocar_server.models import Catalogue, clean_downloads
from trocar_server.rpc.gates import ReplaceableGate
from trocar_server.rpc.server import Parts, RpcServer, start_server
from trocar_server.server_id import server_id
from trocar_server.specs import dataset_folders, model_spec
from trocar_server.telemetry import Telemetry, open_telemetry
from trocar_server.training.datasets import DatasetLibrary, DatasetStore
from trocar_server.training.fitting import Fits
from trocar_server.training.storage import StorageOnDemand
from trocar_server.training.trainers import Trainers
from trocar_server.warming import warm_up

_log = structlog.get_logger("trocar")


@dataclass
class App:
    """A running server and what it runs on."""

    engine: Engine
    datasets: DatasetLibrary
    trainers: Trainers
    fits: Fits
    rpc: RpcServer
    lifecycle: Lifecycle
    grace_s: float
    telemetry: Telemetry = field(default_factory=Telemetry)

    async def stop(self) -> None:
        """Let calls finish within the grace, then end the owner thread."""
        self.lifecycle.stop()
        # Both at once: calls that watch a fit end when it has stopped.
        await asyncio.gather(self.rpc.stop(self.grace_s), self.fits.stop())
        await self.trainers.stop()
        await self.engine.compiled.stop()
        await asyncio.to_thread(self.telemetry.stop)
        await asyncio.to_thread(self.engine.owner.stop)


async def start(  # noqa: PLR0915 - everything that starts, in order
    config: ServerConfig,
    factories: Mapping[str, Callable[[], Any]] | None = None,
    log: Any = _log,
    *,
    is_alone: bool = False,
    reread: Callable[[], ServerConfig] | None = None,
) -> App:
    """Listen, load every model of the configuration, then report SERVING.

    Whatever fails, nothing is left running.

    Args:
        config: What to host, and how.
        factories: By model id: builds it, in place of what its configuration names.
        log: Where lines about models and calls go.
        is_alone: Whether no other server may have the data directory.
        reread: Reads the configuration again, for a reload.

    Raises:
        ServiceError: A model cannot be loaded, the address cannot be used, or another server has the data
            directory.
    """
    check_address(config)
    credentials = credentials_of(config)
    catalogue = _catalogue(config, factories or {})
    transfers = partial(transfers_of, pinned_bytes=config.engine.pinned_bytes)
    owner = DeviceThread(choose_device(config.device), config.threads, transfers)
    data_dir = config.data_dir.expanduser()
    gate = ReplaceableGate(gate_of(config, data_dir, log))
    clean_downloads(data_dir)
    form_folder.remove_leftovers()
    edit_store = EditStore(data_dir / "edits")
    edit_store.clean()
    datasets = _datasets(config, data_dir)
    engine = Engine(catalogue, owner, config.limits, data_dir, _replicas(config), config.engine)
    async with AsyncExitStack() as undo:
        owner.start()
        undo.push_async_callback(asyncio.to_thread, owner.stop)
        undo.push_async_callback(engine.compiled.stop)
        storage = StorageOnDemand(data_dir, config.limits.max_checkpoints)
        undo.callback(storage.close)
        if is_alone:
            await asyncio.to_thread(_take, storage)
        trainers = Trainers(engine, storage, data_dir / "scratch")
        fits = Fits(trainers, datasets, data_dir / "fits", data_dir / "scratch")
        trainers.on_close = fits.forget
        telemetry = open_telemetry(config, engine, trainers, log)
        undo.push_async_callback(asyncio.to_thread, telemetry.stop)
        own_id = await asyncio.to_thread(server_id, data_dir)
        lifecycle = Lifecycle(own_id, config, data_dir, engine, datasets, fits, gate, log, reread)
        undo.callback(lifecycle.stop)
        rpc = await start_server(
            Parts(engine, edit_store, datasets, trainers, fits, lifecycle, lifecycle.doors),
            config.host,
            config.port,
            with_reflection=config.reflection,
            log=log,
            gate=gate,
            credentials=credentials,
            max_message_bytes=config.max_message_bytes,
            observer=telemetry.observer,
        )
        undo.push_async_callback(rpc.stop, config.grace_s)
        lifecycle.begin(rpc)
        if config.health_port is not None:
            await rpc.open_health_port(config.host, config.health_port)
        for model_id in config.models:
            await engine.load(model_id)
            log.info("model loaded", model_id=model_id)
        await trainers.start()
        undo.push_async_callback(trainers.stop)
        await fits.restore_all()
        trainers.ready.set()
        undo.push_async_callback(fits.stop)
        await rpc.set_serving()
        undo.pop_all()
    return App(engine, datasets, trainers, fits, rpc, lifecycle, config.grace_s, telemetry)


async def serve(
    config: ServerConfig,
    on_ready: Callable[[App], None],
    reread: Callable[[], ServerConfig] | None = None,
) -> None:
    """Run until SIGTERM or SIGINT, or until `on_ready` raises, then stop gracefully.

    SIGHUP reads the configuration again.

    Args:
        config: What to host, and how.
        on_ready: Told when clients are let in.
        reread: Reads the configuration again.

    Raises:
        ServiceError: As `start` does.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    reloads: set[asyncio.Task[None]] = set()
    app = await start(config, is_alone=True, reread=reread)
    loop.add_signal_handler(signal.SIGHUP, lambda: reloads.add(asyncio.create_task(_reload(app))))
    try:
        # What exists now stays: a full collection of garbage walks 365,000 objects of torch otherwise,
        # for 0.2 s. What of it is garbage stays, too: 3 MB, and no 0.3 s in which nobody is answered.
        gc.freeze()
        gc.enable()
        on_ready(app)
        warming = asyncio.create_task(warm_up(app.engine))
        await stop.wait()
        warming.cancel()
        _log.info("stopping", grace_s=config.grace_s)
    finally:
        await app.stop()


async def _reload(app: App) -> None:
    """Read the configuration again for SIGHUP: what is wrong with it is in the log."""
    with suppress(ServiceError):
        await app.lifecycle.reload()


def _take(storage: StorageOnDemand) -> None:
    """Take the data directory for this server alone, as far as there is a disk to write to.

    Raises:
        ServiceError: `STORAGE_UNAVAILABLE`, another server has it; the message names it.
    """
    try:
        storage.get()
    except ServiceError as error:
        if "process" in error.details:
            raise
        _log.warning("no trainers", reason=error.reason, why=error.message)


def _datasets(config: ServerConfig, data_dir: Path) -> DatasetLibrary:
    limits = config.limits
    store = DatasetStore(data_dir / "datasets", limits.max_dataset_bytes, limits.max_image_pixels)
    store.clean()
    return DatasetLibrary(store, dataset_folders(config), limits.max_image_pixels)


def _replicas(config: ServerConfig) -> dict[str, int]:
    return {model_id: model.replicas for model_id, model in config.models.items()}


def _catalogue(config: ServerConfig, factories: Mapping[str, Callable[[], Any]]) -> Catalogue:
    catalogue = Catalogue()
    for model_id, model in config.models.items():
        catalogue.add(model_spec(model_id, model, factories.get(model_id)))
    return catalogue
