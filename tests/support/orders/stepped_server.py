"""A server whose every event is a callback of one loop: without sockets, and without a thread for torch."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from threading import current_thread
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.orders.doorway import Door, doorway
from trocar_server.app import app, assembly
from trocar_server.app.assembly import ReplicaSetup
from trocar_server.config import ServerConfig
from trocar_server.engine.schedule.device import DeviceThread
from trocar_server.engine.transfer import using
from trocar_server.rpc.call.forwarded import GatewayAccess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


class _Signals:
    """Lets the device serve one job for each signal, as a callback of the loop."""

    def __init__(self, serve: Any) -> None:
        self._serve, self._is_due = serve, False

    def put(self, is_job: bool) -> None:
        if is_job:
            asyncio.get_running_loop().call_soon(self._one)

    def get(self) -> bool:
        self._is_due, was_due = False, self._is_due
        return was_due

    def _one(self) -> None:
        self._is_due = True
        self._serve()


class SteppedDevice(DeviceThread):
    """The device, whose jobs run on the loop's own thread, one by one, when it is their turn."""

    def start(self) -> None:
        self._signals = _Signals(self._serve_one)  # type: ignore[assignment]
        self._thread = current_thread()

    def _serve_one(self) -> None:
        with using(self._transfers):
            self._serve_jobs()

    def stop(self) -> None:
        self._has_ended = True


class SteppedServer:
    """A running server and its door."""

    def __init__(self, running: app.App, door: Door) -> None:
        self.app, self.door = running, door
        self._is_stopped = False

    async def stop(self) -> None:
        """Stop, as on SIGTERM; a second time it does nothing."""
        if not self._is_stopped:
            self._is_stopped = True
            await self.app.stop()


@asynccontextmanager
async def stepped_server(
    folder: Path, *, owners: Any = None, **settings: Any
) -> AsyncIterator[SteppedServer]:
    """Start a server within the running loop; stop it when the context ends."""
    reread, key = settings.pop("reread", None), settings.pop("gateway_key", "")
    config = ServerConfig(port=0, grace_s=1.0, device="cpu", data_dir=folder, **settings)
    with pytest.MonkeyPatch.context() as patch, doorway() as doors:
        patch.setattr(assembly, "DeviceThread", SteppedDevice)
        running = await app.start(
            config,
            reread=None if reread is None else lambda: reread(folder),
            setup=ReplicaSetup(owners=owners, gateway=GatewayAccess(key=key)),
        )
    server = SteppedServer(running, doors[0])
    try:
        yield server
    finally:
        await server.stop()
