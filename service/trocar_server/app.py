"""The server as a whole: configuration in, a running process out."""

import asyncio
import gc
import signal
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.access import check_address, credentials_of, gate_of
from trocar_server.config import ModelConfig, ServerConfig
from trocar_server.edit_store import EditStore
from trocar_server.engine.device import DeviceThread, choose_device
from trocar_server.engine.engine import Engine
from trocar_server.errors import ServiceError
from trocar_server.models import Catalogue, ModelSpec, PreprocessingSpec, clean_downloads, default_categories
from trocar_server.rpc.server import Parts, RpcServer, start_server
from trocar_server.telemetry import Telemetry, open_telemetry
from trocar_server.training.datasets import DatasetLibrary, DatasetStore, listed_folders
from trocar_server.training.fitting import Fits
from trocar_server.training.storage import StorageOnDemand
from trocar_server.training.trainers import Trainers

_TORCHVISION = "torchvision:"
_log = structlog.get_logger("trocar")


@dataclass
class App:
    """A running server and what it runs on."""

    engine: Engine
    datasets: DatasetLibrary
    trainers: Trainers
    fits: Fits
    rpc: RpcServer
    grace_s: float
    telemetry: Telemetry = field(default_factory=Telemetry)

    async def stop(self) -> None:
        """Let calls finish within the grace, then end the owner thread."""
        # Both at once: calls that watch a fit end when it has stopped.
        await asyncio.gather(self.rpc.stop(self.grace_s), self.fits.stop())
        await self.trainers.stop()
        await self.engine.compiled.stop()
        await asyncio.to_thread(self.telemetry.stop)
        await asyncio.to_thread(self.engine.owner.stop)


async def start(
    config: ServerConfig, factories: Mapping[str, Callable[[], Any]] | None = None, log: Any = _log
) -> App:
    """Listen, load every model of the configuration, then report SERVING.

    Whatever fails, nothing is left running.

    Args:
        config: What to host, and how.
        factories: By model id: builds it, in place of what its configuration names.
        log: Where lines about models and calls go.

    Raises:
        ServiceError: A model cannot be loaded, or the address cannot be used.
    """
    check_address(config)
    credentials = credentials_of(config)
    catalogue = _catalogue(config, factories or {})
    owner = DeviceThread(choose_device(config.device), config.threads)
    data_dir = config.data_dir.expanduser()
    gate = gate_of(config, data_dir, log)
    clean_downloads(data_dir)
    edit_store = EditStore(data_dir / "edits")
    edit_store.clean()
    datasets = _datasets(config, data_dir)
    replicas = {model_id: model.replicas for model_id, model in config.models.items()}
    engine = Engine(catalogue, owner, config.limits, data_dir, replicas, config.engine)
    async with AsyncExitStack() as undo:
        owner.start()
        undo.push_async_callback(asyncio.to_thread, owner.stop)
        undo.push_async_callback(engine.compiled.stop)
        storage = StorageOnDemand(data_dir, config.limits.max_checkpoints)
        undo.callback(storage.close)
        trainers = Trainers(engine, storage, data_dir / "scratch")
        fits = Fits(trainers, datasets, data_dir / "fits", data_dir / "scratch")
        trainers.on_close = fits.forget
        telemetry = open_telemetry(config, engine, trainers, log)
        undo.push_async_callback(asyncio.to_thread, telemetry.stop)
        rpc = await start_server(
            Parts(engine, edit_store, datasets, trainers, fits),
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
    return App(engine, datasets, trainers, fits, rpc, config.grace_s, telemetry)


async def serve(config: ServerConfig, on_ready: Callable[[App], None]) -> None:
    """Run until SIGTERM or SIGINT, or until `on_ready` raises, then stop gracefully."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    app = await start(config)
    try:
        # What exists now stays: a full collection of garbage walks 365,000 objects of torch otherwise,
        # for 0.2 s.
        gc.collect()
        gc.freeze()
        on_ready(app)
        await stop.wait()
        _log.info("stopping", grace_s=config.grace_s)
    finally:
        await app.stop()


def _datasets(config: ServerConfig, data_dir: Path) -> DatasetLibrary:
    limits = config.limits
    store = DatasetStore(data_dir / "datasets", limits.max_dataset_bytes, limits.max_image_pixels)
    store.clean()
    paths = {name: dataset.path for name, dataset in config.datasets.items()}
    return DatasetLibrary(store, listed_folders(paths), limits.max_image_pixels)


def _catalogue(config: ServerConfig, factories: Mapping[str, Callable[[], Any]]) -> Catalogue:
    catalogue = Catalogue()
    for model_id, model in config.models.items():
        catalogue.add(model_spec(model_id, model, factories.get(model_id)))
    return catalogue


def model_spec(model_id: str, config: ModelConfig, factory: Callable[[], Any] | None = None) -> ModelSpec:
    """Turn one entry of the configuration into what the catalogue keeps.

    Args:
        model_id: Its id.
        config: What the configuration says.
        factory: Builds it, in place of what the configuration names.

    Raises:
        ServiceError: `MODEL_INVALID`, something in the entry does not work, or its file of categories
            cannot be read.
    """
    given = config.preprocessing
    return ModelSpec(
        model_id=model_id,
        architecture=config.factory or config.architecture or model_id,
        weights=config.weights,
        options=config.options,
        arguments=config.arguments,
        categories=_categories(config.categories),
        preprocessing=None if given is None else PreprocessingSpec(**given.model_dump()),
        input_shape=config.input_shape,
        stages=config.stages,
        numerics=config.numerics,
        factory=factory,
    )


def _categories(given: tuple[str, ...] | str | None) -> tuple[str, ...] | None:
    if not isinstance(given, str):
        return given
    if given.startswith(_TORCHVISION):
        return default_categories(given.removeprefix(_TORCHVISION))
    return _lines(Path(given))


def _lines(path: Path) -> tuple[str, ...]:
    try:
        return tuple(path.read_text(encoding="utf-8").splitlines())
    except (OSError, UnicodeDecodeError) as error:
        problem = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        raise ServiceError(
            ErrorReason.MODEL_INVALID, f"cannot read the categories in '{path.name}': {problem}"
        ) from None
