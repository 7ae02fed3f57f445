"""Server assembly: from a configuration to a running process."""

import asyncio
import gc
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch

from trocar_server.app.access import authorizer_of, check_address, credentials_of, insecurity_of
from trocar_server.app.lifecycle import Lifecycle
from trocar_server.app.page_process import PageProcess
from trocar_server.app.server_id import server_id
from trocar_server.app.specs import dataset_folders, model_spec
from trocar_server.app.state_folder import settle
from trocar_server.app.stopping import EXIT_HELD, Stopping, end_now
from trocar_server.app.warm_up import warm_up
from trocar_server.config import ServerConfig
from trocar_server.decoding.pixels import Conversion
from trocar_server.edit_store import EditStore
from trocar_server.engine.compiled.backends.availability import available_numerics
from trocar_server.engine.engine import Engine
from trocar_server.engine.execute.image_decoder import ImageDecoder
from trocar_server.engine.schedule.device import DeviceThread, choose_device
from trocar_server.engine.transfer import transfers_of
from trocar_server.errors import ServiceError
from trocar_server.models import Catalogue, clean_downloads
from trocar_server.models.spec import check_model_id
from trocar_server.rpc.call.authorization import ReplaceableAuthorizer
from trocar_server.rpc.call.forwarded import GatewayAccess
from trocar_server.rpc.server import Parts, RpcServer, start_server
from trocar_server.storage.temporary_folder import remove_leftovers
from trocar_server.tasks import begin
from trocar_server.telemetry import Telemetry, open_telemetry
from trocar_server.training.datasets import DatasetLibrary, DatasetStore
from trocar_server.training.files.owner_folders import OwnerFolders
from trocar_server.training.files.trainer_storage import StorageOnDemand
from trocar_server.training.fit.fitting import Fits
from trocar_server.training.fit.ranks.rank_launch import RankLauncher
from trocar_server.training.takeover import Takeover
from trocar_server.training.trainers import Trainers

_log = structlog.get_logger("trocar")
_NO_GATEWAY = GatewayAccess()


@dataclass
class App:
    """A running server and its resources."""

    engine: Engine
    datasets: DatasetLibrary
    trainers: Trainers
    fits: Fits
    rpc: RpcServer
    lifecycle: Lifecycle
    grace_s: float
    telemetry: Telemetry = field(default_factory=Telemetry)
    page: PageProcess | None = None
    takeover: Takeover | None = None
    """On a cluster."""

    async def stop(self) -> None:
        """Let calls finish within the grace period, then stop the owner thread."""
        self.lifecycle.stop()
        if self.takeover is not None:
            await self.takeover.stop()
        if self.page is not None:
            await self.page.stop()
        # Also for fits and uploads: whatever they wait for ends with the grace period.
        decoding = asyncio.get_running_loop().call_later(self.grace_s, self.engine.preparation.stop)
        # Both at once: calls that watch a fit end when it has stopped.
        await asyncio.gather(self.rpc.stop(self.grace_s), self.fits.stop())
        await self.trainers.stop()
        decoding.cancel()
        self.engine.preparation.stop()
        await self.engine.compiled.stop()
        await asyncio.to_thread(self.telemetry.stop)
        await asyncio.to_thread(self.engine.owner.stop)


async def start(  # noqa: PLR0913, PLR0915 - everything that starts, in order
    config: ServerConfig,
    factories: Mapping[str, Callable[[], Any]] | None = None,
    log: Any = _log,
    *,
    is_alone: bool = False,
    reread: Callable[[], ServerConfig] | None = None,
    own_dir: Path | None = None,
    gateway: GatewayAccess = _NO_GATEWAY,
    owners: OwnerFolders | None = None,
    launcher: RankLauncher | None = None,
) -> App:
    """Listen, load every model of the configuration, then report SERVING.

    A model that cannot be loaded is listed with the reason, and the others are served; see
    `ServerConfig.strict`.

    On failure nothing is left running.

    Args:
        config: The server's configuration.
        factories: Model factories by model id; each overrides the configured architecture.
        log: Logger for models and calls.
        is_alone: Whether to lock the data directory against other servers.
        reread: Reads the configuration again, for a reload.
        own_dir: Folder of trainers and fits, where several servers share the data directory; the data
            directory when None.
        gateway: Access of the gateways of a cluster.
        owners: Folders of trainers that several servers share, and take over from each other; in `own_dir`
            when None.
        launcher: Starts the workers of fits; processes of this machine when None.

    Raises:
        ServiceError: No model can be loaded, or with `strict` one cannot; the address cannot be used, or
            another server has the data directory.
    """
    check_address(config)
    page = PageProcess(config) if config.page.enabled else None
    if problem := insecurity_of(config):
        log.warning("insecure", problem=problem, advice="tokens = true, tls_cert and tls_key")
    credentials = credentials_of(config)
    catalogue = _catalogue(config, factories or {}, log)
    transfers = partial(transfers_of, pinned_bytes=config.engine.pinned_bytes)
    owner = DeviceThread(choose_device(config.device), config.threads, transfers)
    data_dir = await asyncio.to_thread(settle, config, log)
    own_dir = own_dir or data_dir
    authorizer = ReplaceableAuthorizer(authorizer_of(config, data_dir, log))
    clean_downloads(config.weights_dir)
    remove_leftovers()
    edit_store = EditStore(data_dir / "edits")
    edit_store.clean()
    conversion = Conversion(config.images.orient, config.images.scale_16_bit)
    engine = Engine(
        catalogue,
        owner,
        config.limits,
        config.weights_dir,
        _replicas(config),
        config.engine,
        conversion,
        data_dir / "compiled",
    )
    engine.compiled.clean()
    engine.preparation.attach()
    datasets = _datasets(config, data_dir, engine.preparation.decoder)
    async with AsyncExitStack() as cleanup:
        if page is not None:
            cleanup.push_async_callback(page.stop)
        owner.start()
        cleanup.push_async_callback(asyncio.to_thread, owner.stop)
        cleanup.callback(engine.preparation.stop)
        cleanup.push_async_callback(engine.compiled.stop)
        storage = StorageOnDemand(own_dir, config.limits.max_checkpoints, owners=owners)
        cleanup.callback(storage.close)
        if is_alone:
            await asyncio.to_thread(_take, storage)
        is_durable = owners is not None and config.cluster.durable_steps
        trainers = Trainers(engine, storage, own_dir / "scratch", has_durable_steps=is_durable)
        events_dir = own_dir / "fits" if owners is None else owners.own
        fits = Fits(
            trainers,
            datasets,
            events_dir,
            own_dir / "scratch",
            is_shared=owners is not None,
            launcher=launcher,
        )
        trainers.on_close, trainers.on_moved, trainers.on_taken = fits.forget, fits.let_go, fits.resume_soon
        takeover = None if owners is None else Takeover(owners, trainers)
        if takeover is not None:
            trainers.check_elsewhere = takeover.check_elsewhere
            trainers.trainers_elsewhere = takeover.trainers_elsewhere
        used = config.model_copy(update={"data_dir": data_dir})
        telemetry = open_telemetry(used, engine, trainers, log)
        cleanup.push_async_callback(asyncio.to_thread, telemetry.stop)
        own_id = await asyncio.to_thread(server_id, data_dir)
        lifecycle = Lifecycle(
            own_id,
            config,
            data_dir,
            engine,
            datasets,
            trainers,
            fits,
            authorizer,
            log,
            reread,
            telemetry.traces_off,
        )
        cleanup.callback(lifecycle.stop)
        rpc = await start_server(
            Parts(engine, edit_store, datasets, trainers, fits, lifecycle, lifecycle.drain_switch),
            config.host,
            config.port,
            with_reflection=config.reflection,
            log=log,
            authorizer=authorizer,
            credentials=credentials,
            max_message_bytes=config.max_message_bytes,
            observer=telemetry.observer,
            own_socket=None if page is None else page.socket,
            gateway=gateway,
        )
        cleanup.push_async_callback(rpc.stop, config.grace_s)
        lifecycle.begin(rpc)
        if config.health_port is not None:
            await rpc.open_health_port(config.host, config.health_port)
        if page is not None:
            await page.start(log)
        await _load_models(config, engine, log)
        _log_numerics(config, owner.device, log)
        cleanup.push_async_callback(trainers.stop)
        await trainers.start()
        cleanup.push_async_callback(fits.stop)
        await fits.restore_all()
        trainers.ready.set()
        if takeover is not None:
            takeover.start()
            cleanup.push_async_callback(takeover.stop)
        _log_features_off(lifecycle, log)
        await lifecycle.set_loaded()
        cleanup.pop_all()
    return App(engine, datasets, trainers, fits, rpc, lifecycle, config.grace_s, telemetry, page, takeover)


async def serve(
    config: ServerConfig,
    on_ready: Callable[[App], None],
    reread: Callable[[], ServerConfig] | None = None,
    own_dir: Path | None = None,
    gateway: GatewayAccess = _NO_GATEWAY,
    owners: OwnerFolders | None = None,
    launcher: RankLauncher | None = None,
) -> None:
    """Run until SIGTERM or SIGINT, or until `on_ready` raises, then stop gracefully.

    SIGHUP reads the configuration again; while models load, as soon as they are loaded.

    Args:
        config: The server's configuration.
        on_ready: Called once the server accepts clients.
        reread: Reads the configuration again.
        own_dir: See `start`.
        gateway: See `start`.
        owners: See `start`.
        launcher: See `start`.

    Raises:
        ServiceError: As `start` does.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    reloads: set[asyncio.Task[None]] = set()
    starting = asyncio.create_task(
        start(
            config,
            is_alone=True,
            reread=reread,
            own_dir=own_dir,
            gateway=gateway,
            owners=owners,
            launcher=launcher,
        )
    )
    loop.add_signal_handler(signal.SIGHUP, lambda: begin(_reload(starting), reloads))
    app = await _started(starting, stop, config.grace_s)
    if app is None:
        return
    try:
        # Freeze existing objects: a full garbage collection otherwise walks 365,000 objects of torch, for 0.2
        # s. Garbage among them stays, too: 3 MB, in exchange for a pause of 0.3 s in which no call is
        # answered.
        gc.freeze()
        gc.enable()
        on_ready(app)
        warming = asyncio.create_task(warm_up(app.engine))
        await stop.wait()
        warming.cancel()
        _log.info("stopping", grace_s=config.grace_s)
    finally:
        stopping = Stopping(app.engine, app.trainers, app.fits, config.grace_s, _log)
        await stopping.run(app.stop())


async def _started(starting: asyncio.Task[App], stop: asyncio.Event, grace_s: float) -> App | None:
    """Wait for the start; None if it was ended by a signal to stop, with nothing left running.

    The end waits for the model that is being built, for the grace period. A second signal does not: nothing
    is unsaved yet.

    Raises:
        ServiceError: As `start` does.
    """
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            return starting.result()
        _log.info("stopping before the start is complete")
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, os._exit, 128 + number)
    finally:
        stopping.cancel()
        if not starting.done():
            starting.cancel()
            if not (await asyncio.wait((starting,), timeout=grace_s))[0]:
                end_now(EXIT_HELD)
            with suppress(asyncio.CancelledError):
                await starting
    return None


async def _reload(starting: asyncio.Task[App]) -> None:
    """Reload the configuration on SIGHUP, once the server has started; errors are logged."""
    await asyncio.wait((starting,))
    if starting.cancelled() or starting.exception() is not None:
        return
    with suppress(ServiceError):
        await starting.result().lifecycle.reload()


def _log_features_off(lifecycle: Lifecycle, log: Any) -> None:
    off = [f"{feature.name}: {feature.problem}" for feature in lifecycle.features() if not feature.is_on]
    log.info("not offered", features="; ".join(off))


def _log_numerics(config: ServerConfig, device: torch.device, log: Any) -> None:
    """Log the numerics that are faster than exact here; warn if the configuration requests others."""
    engine = config.engine
    found = available_numerics(device, compiles=bool(engine.compile_after), uses_openvino=engine.openvino)
    wanted = {engine.numerics, *(model.numerics or engine.numerics for model in config.models.values())}
    missing = {numerics: reason for numerics, reason in found.items() if reason}
    say = log.warning if wanted & missing.keys() else log.info
    say("numerics", **{numerics: reason or "available" for numerics, reason in found.items()})


def _take(storage: StorageOnDemand) -> None:
    """Lock the data directory for this server, if it is writable.

    Raises:
        ServiceError: `STORAGE_UNAVAILABLE`, another server has locked it; the message names that server.
    """
    try:
        storage.get()
    except ServiceError as error:
        if "process" in error.details:
            raise
        _log.warning("no trainers", reason=error.reason, why=error.message)


def _datasets(config: ServerConfig, data_dir: Path, decoder: ImageDecoder) -> DatasetLibrary:
    limits = config.limits
    store = DatasetStore(data_dir / "datasets", limits.max_dataset_bytes, limits.max_image_pixels)
    store.clean()
    folders = dataset_folders(config)
    return DatasetLibrary(store, folders, limits.max_image_pixels, decoder.decode_from_thread)


def _replicas(config: ServerConfig) -> dict[str, int]:
    return {model_id: model.replicas for model_id, model in config.models.items()}


def _catalogue(
    config: ServerConfig, factories: Mapping[str, Callable[[], Any]], log: Any = _log
) -> Catalogue:
    """Catalogue of every configured model; one with an invalid entry is listed as failed, unless `strict`."""
    catalogue = Catalogue()
    for model_id, model in config.models.items():
        try:
            entry = catalogue.add(model_spec(model_id, model, factories.get(model_id)))
            entry.begin()  # it waits in line
        except ServiceError as error:
            if config.strict:
                raise
            check_model_id(model_id)
            catalogue.add_failed(model_id, error)
            log.error("model failed", model_id=model_id, reason=error.reason, why=error.message)
    return catalogue


async def _load_models(config: ServerConfig, engine: Engine, log: Any) -> None:
    """Load every configured model; those that fail are listed with the reason, and the others are served.

    Raises:
        ServiceError: A model failed, and `strict` is set; or none works.
    """
    errors: list[ServiceError] = []
    for model_id in config.models:
        if not engine.catalogue.has(model_id):  # a reload has removed it meanwhile
            continue
        is_told = not engine.catalogue.get(model_id).is_spec_known
        try:
            await engine.deployments.load(model_id)
        except ServiceError as error:
            if not engine.catalogue.has(model_id):
                continue
            if config.strict:
                raise
            errors.append(error)
            if not is_told:
                log.error("model failed", model_id=model_id, reason=error.reason, why=error.message)
        else:
            log.info("model loaded", model_id=model_id)
    if errors and len(errors) == len(config.models):
        raise _none_works(errors)


def _none_works(errors: list[ServiceError]) -> ServiceError:
    if len(errors) == 1:
        return errors[0]
    why = "; ".join(error.message for error in errors)
    return ServiceError(errors[0].reason, f"none of the {len(errors)} models could be loaded: {why}")
