"""App: a server from its configuration to a running process, and its end.

running = await start(config)
await running.stop()
"""

import asyncio
import gc
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any

import structlog
import torch

from trocar_server.app.assembly import Assembly, ReplicaSetup, assemble
from trocar_server.app.configured_models import load_configured
from trocar_server.app.lifecycle import Lifecycle
from trocar_server.app.page_process import PageProcess
from trocar_server.app.server_id import server_id
from trocar_server.app.stopping import EXIT_HELD, Stopping, end_now
from trocar_server.app.warm_up import warm_up
from trocar_server.config import ServerConfig
from trocar_server.engine.compiled.backends.availability import available_numerics
from trocar_server.engine.engine import Engine
from trocar_server.errors import ServiceError
from trocar_server.rpc.server import Parts, RpcServer, start_server
from trocar_server.tasks import begin
from trocar_server.telemetry import Telemetry, open_telemetry
from trocar_server.training.datasets import DatasetLibrary
from trocar_server.training.fit.fitting import Fits
from trocar_server.training.takeover import Takeover
from trocar_server.training.trainers import Trainers

_log = structlog.get_logger("trocar")
_BY_ITSELF = ReplicaSetup()


@dataclass
class App:
    """A running server and its parts."""

    engine: Engine
    datasets: DatasetLibrary
    trainers: Trainers
    fits: Fits
    rpc: RpcServer
    lifecycle: Lifecycle
    grace_s: float
    telemetry: Telemetry
    page: PageProcess | None
    takeover: Takeover | None
    """On a cluster."""
    _ends: AsyncExitStack

    async def stop(self) -> None:
        """Let calls finish within the grace period, then end what `start` began, in reverse."""
        await self._ends.aclose()


async def start(
    config: ServerConfig,
    factories: Mapping[str, Callable[[], Any]] | None = None,
    log: Any = _log,
    *,
    is_alone: bool = False,
    reread: Callable[[], ServerConfig] | None = None,
    setup: ReplicaSetup = _BY_ITSELF,
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
        setup: Of a replica of a cluster.

    Raises:
        ServiceError: No model can be loaded, or with `strict` one cannot; the address cannot be used, or
            another server has the data directory.
    """
    parts = await assemble(config, factories or {}, setup, log)
    # Each step notes its end; a stop, and a start that fails, run the ends in reverse.
    async with AsyncExitStack() as ends:
        _begin_computing(parts, ends)
        await _open_storage(parts, ends, is_alone=is_alone)
        telemetry = _observe(parts, ends)
        lifecycle = await _lifecycle(parts, reread, telemetry.traces_off)
        rpc = await _listen(parts, lifecycle, telemetry, ends)
        await _supervise(parts, lifecycle, rpc, ends)
        await _serve_page(parts, ends)
        await load_configured(config, parts.engine, log)
        _log_numerics(config, parts.engine.owner.device, log)
        await _restore_training(parts)
        _begin_takeover(parts, ends)
        _log_features_off(lifecycle, log)
        await lifecycle.set_loaded()
        return App(
            parts.engine,
            parts.datasets,
            parts.trainers,
            parts.fits,
            rpc,
            lifecycle,
            config.grace_s,
            telemetry,
            parts.page,
            parts.takeover,
            ends.pop_all(),
        )


def _begin_computing(parts: Assembly, ends: AsyncExitStack) -> None:
    """Start the thread that calls torch. It ends last, after what gives it work."""
    engine = parts.engine
    engine.owner.start()
    ends.push_async_callback(asyncio.to_thread, engine.owner.stop)
    ends.push_async_callback(engine.compiled.stop)
    ends.callback(engine.preparation.stop)


async def _open_storage(parts: Assembly, ends: AsyncExitStack, *, is_alone: bool) -> None:
    """Lock the data directory for this server, if it is to be alone there and can write.

    Raises:
        ServiceError: `STORAGE_UNAVAILABLE`, another server has locked it; the message names that server.
    """
    ends.callback(parts.storage.close)
    if not is_alone:
        return
    try:
        await asyncio.to_thread(parts.storage.get)
    except ServiceError as error:
        if "process" in error.details:
            raise
        _log.warning("no trainers", reason=error.reason, why=error.message)


def _observe(parts: Assembly, ends: AsyncExitStack) -> Telemetry:
    """Start metrics and traces, as configured."""
    used = parts.config.model_copy(update={"data_dir": parts.data_dir})
    telemetry = open_telemetry(used, parts.engine, parts.trainers, parts.log)
    ends.push_async_callback(asyncio.to_thread, telemetry.stop)
    return telemetry


async def _lifecycle(
    parts: Assembly, reread: Callable[[], ServerConfig] | None, traces_off: str
) -> Lifecycle:
    return Lifecycle(
        await asyncio.to_thread(server_id, parts.data_dir),
        parts.config,
        parts.data_dir,
        parts.engine,
        parts.datasets,
        parts.trainers,
        parts.fits,
        parts.authorizer,
        parts.log,
        reread,
        traces_off,
    )


async def _listen(
    parts: Assembly, lifecycle: Lifecycle, telemetry: Telemetry, ends: AsyncExitStack
) -> RpcServer:
    """Accept calls. What they begin, fits and trainers, ends with them."""
    config = parts.config
    rpc = await start_server(
        Parts(
            parts.engine,
            parts.edit_store,
            parts.direction_store,
            parts.data_dir,
            parts.datasets,
            parts.trainers,
            parts.fits,
            lifecycle,
            lifecycle.drain_switch,
        ),
        config.host,
        config.port,
        with_reflection=config.reflection,
        log=parts.log,
        authorizer=parts.authorizer,
        credentials=parts.credentials,
        max_message_bytes=config.max_message_bytes,
        observer=telemetry.observer,
        own_socket=None if parts.page is None else parts.page.socket,
        gateway=parts.setup.gateway,
    )
    ends.push_async_callback(_end_work, parts, rpc)
    return rpc


async def _end_work(parts: Assembly, rpc: RpcServer) -> None:
    """Let calls and fits end within the grace period, then save the trainers."""
    grace_s, preparation = parts.config.grace_s, parts.engine.preparation
    # Also for fits and uploads: whatever they wait for ends with the grace period.
    decoding = asyncio.get_running_loop().call_later(grace_s, preparation.stop)
    try:
        # Both at once: calls that watch a fit end when it has stopped.
        await asyncio.gather(rpc.stop(grace_s), parts.fits.stop())
        await parts.trainers.stop()
    finally:
        decoding.cancel()


async def _supervise(parts: Assembly, lifecycle: Lifecycle, rpc: RpcServer, ends: AsyncExitStack) -> None:
    """End calls whose caller loses authorization, and answer checks of health at a port of their own."""
    lifecycle.begin(rpc)
    ends.callback(lifecycle.stop)
    if parts.config.health_port is not None:
        await rpc.open_health_port(parts.config.host, parts.config.health_port)


async def _serve_page(parts: Assembly, ends: AsyncExitStack) -> None:
    """Start the page's process, if it is enabled."""
    if parts.page is not None:
        ends.push_async_callback(parts.page.stop)
        await parts.page.start(parts.log)


async def _restore_training(parts: Assembly) -> None:
    """Host published models, restore trainers and resume their fits; calls to them wait until then."""
    await parts.trainers.start()
    await parts.fits.restore_all()
    parts.trainers.ready.set()


def _begin_takeover(parts: Assembly, ends: AsyncExitStack) -> None:
    """Look for trainers of lost servers from now on, on a cluster."""
    if parts.takeover is not None:
        parts.takeover.start()
        ends.push_async_callback(parts.takeover.stop)


async def serve(
    config: ServerConfig,
    on_ready: Callable[[App], None],
    reread: Callable[[], ServerConfig] | None = None,
    setup: ReplicaSetup = _BY_ITSELF,
) -> None:
    """Run until SIGTERM or SIGINT, or until `on_ready` raises, then stop gracefully.

    SIGHUP reads the configuration again; while models load, as soon as they are loaded.

    Args:
        config: The server's configuration.
        on_ready: Called once the server accepts clients.
        reread: Reads the configuration again.
        setup: See `start`.

    Raises:
        ServiceError: As `start` does.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    reloads: set[asyncio.Task[None]] = set()
    starting = asyncio.create_task(start(config, is_alone=True, reread=reread, setup=setup))
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
    off = [feature.name for feature in lifecycle.features() if not feature.is_on]
    log.info("not offered", features=", ".join(off), why="trocar status")


def _log_numerics(config: ServerConfig, device: torch.device, log: Any) -> None:
    """Log the numerics that are faster than exact here; warn if the configuration requests others."""
    engine = config.engine
    result = available_numerics(device, compiles=bool(engine.compile_after), uses_openvino=engine.openvino)
    wanted = {engine.numerics, *(model.numerics or engine.numerics for model in config.models.values())}
    missing = {numerics: reason for numerics, reason in result.items() if reason}
    say = log.warning if wanted & missing.keys() else log.info
    say("numerics", **{numerics: reason or "available" for numerics, reason in result.items()})
