"""The server as a whole: configuration in, a running process out."""

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from trocar_server.config import ModelConfig, ServerConfig
from trocar_server.engine.device import DeviceThread, choose_device
from trocar_server.engine.engine import Engine
from trocar_server.models import Catalogue, ModelSpec, PreprocessingSpec, clean_downloads, default_categories
from trocar_server.rpc.server import RpcServer, start_server

_TORCHVISION = "torchvision:"
_log = structlog.get_logger("trocar")


@dataclass
class App:
    """A running server and what it runs on."""

    engine: Engine
    rpc: RpcServer
    grace_s: float

    async def stop(self) -> None:
        """Let calls finish within the grace, then end the owner thread."""
        await self.rpc.stop(self.grace_s)
        await asyncio.to_thread(self.engine.owner.stop)


async def start(config: ServerConfig) -> App:
    """Listen, load every model of the configuration, then report SERVING.

    Raises:
        ServiceError: A model cannot be loaded, or the address cannot be used.
    """
    owner = DeviceThread(choose_device(config.device), config.threads)
    owner.start()
    data_dir = config.data_dir.expanduser()
    clean_downloads(data_dir)
    catalogue = Catalogue()
    for model_id, model in config.models.items():
        catalogue.add(model_spec(model_id, model))
    replicas = {model_id: model.replicas for model_id, model in config.models.items()}
    engine = Engine(catalogue, owner, config.limits, data_dir, replicas)
    rpc = await start_server(engine, config.host, config.port, with_reflection=config.reflection)
    app = App(engine, rpc, config.grace_s)
    try:
        for model_id in config.models:
            await engine.load(model_id)
            _log.info("model loaded", model_id=model_id)
    except BaseException:
        await app.stop()
        raise
    await rpc.set_serving()
    return app


async def serve(config: ServerConfig, on_ready: Callable[[App], None]) -> None:
    """Run until SIGTERM or SIGINT, then stop gracefully."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    app = await start(config)
    on_ready(app)
    await stop.wait()
    _log.info("stopping", grace_s=config.grace_s)
    await app.stop()


def model_spec(model_id: str, config: ModelConfig) -> ModelSpec:
    """Turn one entry of the configuration into what the catalogue keeps."""
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
    )


def _categories(given: tuple[str, ...] | str | None) -> tuple[str, ...] | None:
    if not isinstance(given, str):
        return given
    if given.startswith(_TORCHVISION):
        return default_categories(given.removeprefix(_TORCHVISION))
    return tuple(Path(given).read_text(encoding="utf-8").splitlines())
