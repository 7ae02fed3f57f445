"""A real server in this process: its event loop on one thread, torch on another."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

from tests.support.servers.defects import kept_defects
from tests.support.servers.event_loop import event_loop
from trocar_server.app import app
from trocar_server.app.assembly import ReplicaSetup
from trocar_server.config import ServerConfig
from trocar_server.rpc.call.forwarded import GatewayAccess
from trocar_server.training.files.owner_folders import OwnerFolders
from trocar_server.training.publishing import OtherPublishing

Result = TypeVar("Result")


class RunningServer:
    """Handle of a server under test."""

    def __init__(self, running: app.App, loop: asyncio.AbstractEventLoop) -> None:
        self.app = running
        self.engine = running.engine
        self._loop = loop

    @property
    def address(self) -> str:
        """Where clients connect."""
        return f"127.0.0.1:{self.app.rpc.port}"

    def run(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Run a coroutine on the server's loop and wait for it."""

        async def call() -> Result:
            return await work()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(60)

    def on_owner(self, work: Callable[[], Result]) -> Result:
        """Run a function on the thread that owns torch and wait for it."""
        return self.run(lambda: self.engine.owner.run(work))


@contextmanager
def running_server(
    *,
    gateway: GatewayAccess | None = None,
    owners: OwnerFolders | None = None,
    own_dir: Path | None = None,
    published: OtherPublishing | None = None,
    **settings: Any,
) -> Iterator[RunningServer]:
    """Start a server on 127.0.0.1 with a free port; stop it when the context ends."""
    setup = ReplicaSetup(own_dir, gateway or GatewayAccess(), owners, published)
    with ExitStack() as folders:
        if "data_dir" not in settings:  # nothing of the machine's own
            settings["data_dir"] = folders.enter_context(TemporaryDirectory())
        config = ServerConfig(port=0, grace_s=1.0, **settings)
        with _running(config, setup) as server:
            yield server


@contextmanager
def _own_threads(config: ServerConfig) -> Iterator[None]:
    """Restore the process's number of threads after a server that sets it: bits depend on it."""
    before = torch.get_num_threads()
    yield
    if config.threads is not None:
        torch.set_num_threads(before)


@contextmanager
def _running(config: ServerConfig, setup: ReplicaSetup) -> Iterator[RunningServer]:
    with kept_defects(), _own_threads(config), event_loop("server-loop") as loop:
        running = asyncio.run_coroutine_threadsafe(app.start(config, setup=setup), loop).result(120)
        try:
            yield RunningServer(running, loop)
        finally:
            asyncio.run_coroutine_threadsafe(running.stop(), loop).result(60)
