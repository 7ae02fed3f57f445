"""Server with asyncio: readiness, description, status, drain and reload."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from trocar._base.concurrency import async_pause
from trocar._wire import from_wire
from trocar.errors import DeadlineExceededError, ModelNotLoadedError, VersionSkewError
from trocar_api.v1 import server_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from trocar._async.connection import AsyncConnection
    from trocar._async.models import AsyncModels
    from trocar._base.server_status import ServerStatus
    from trocar._base.types import DrainState, ServerInfo
    from trocar._page.page import Page

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class AsyncServer:
    """The server as its users and its operator see it.

    Args:
        connection: The connection.
        models: Its models, for which `wait_ready` waits.
    """

    def __init__(self, connection: AsyncConnection, models: AsyncModels) -> None:
        self._connection = connection
        self._models = models

    async def wait_ready(
        self, timeout_s: float = 30.0, *, models: str | Sequence[str] | None = None
    ) -> ServerInfo:
        """Wait until the server answers and its models can be used.

        Args:
            timeout_s: The longest wait, in seconds; a first start may download weights.
            models: Ids of the models to wait for. None for all: until the server is serving and loads no
                model. A failed model is then not waited for; `models` lists it with the reason.

        Returns:
            The result of `server_info`. The method does not wait for a drained server.

        Raises:
            DeadlineExceededError: The server did not answer, or the models were not loaded, in time.
            ModelNotLoadedError: A model of `models` failed, with the reason, or was unloaded.
            UnknownModelError: The server has no such model.
        """
        wanted = [models] if isinstance(models, str) else models
        deadline = time.monotonic() + self._connection.timeout(timeout_s)
        pause_s = _FIRST_PAUSE_S
        while True:
            request, left_s = server_pb2.GetServerInfoRequest(), deadline - time.monotonic()
            if left_s <= 0:
                raise DeadlineExceededError(f"the server did not load its models within {timeout_s} s")
            reply = await self._connection.call(
                self._connection.server_service.GetServerInfo, request, left_s, wait_for_ready=True
            )
            if reply.is_draining or await self._is_ready(wanted, left_s):
                return from_wire.server_info(reply)
            await async_pause(max(0.0, min(pause_s, deadline - time.monotonic())))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _is_ready(self, wanted: Sequence[str] | None, left_s: float) -> bool:
        try:
            is_serving = await self._connection.is_serving(timeout_s=left_s)
        except VersionSkewError:  # a server without health checks, or a proxy before it that answers none
            is_serving = True
        result = {model.model_id: model for model in await self._models.models()}
        if wanted is None:
            return is_serving and all(model.state != "loading" for model in result.values())
        for model_id in wanted:
            model = result.get(model_id)
            if model is None and not is_serving:
                return False  # published models come after those of the configuration
            if model is None:
                model = await self._models.model(model_id)  # a trainer's id, or unknown: that call reports it
            if model.state == "loading":
                return False
            if not model.is_loaded:
                why = model.error_message or "it was unloaded; load it"
                raise ModelNotLoadedError(f"model '{model_id}' is {model.state}: {why}")
        return True

    async def server_info(self) -> ServerInfo:
        """Return the server's version, device and limits."""
        reply = await self._connection.call(
            self._connection.server_service.GetServerInfo, server_pb2.GetServerInfoRequest()
        )
        return from_wire.server_info(reply)

    async def status(self) -> ServerStatus:
        """Return the server's queues, callers and caches at this moment.

        Returns:
            Calls that wait and the seconds of computing that they need, by model; work and share of computing
            of each caller; size and hits of caches. With a token without the scope admin: the queues, and of
            the callers yourself.
        """
        self._connection.check_one("status")
        reply = await self._connection.call(
            self._connection.server_service.GetServerStatus, server_pb2.GetServerStatusRequest()
        )
        return from_wire.server_status(reply)

    async def drain(self, *, undo: bool = False) -> DrainState:
        """Drain the server, or resume service; for its operator.

        Health reports NOT_SERVING and new work is rejected with `ServerDrainingError`. Running calls
        finish; fits are saved and paused. Call again for the progress.

        Args:
            undo: Whether to resume service; the fits continue.

        Raises:
            ScopeMissingError: Your token does not have the scope admin.
        """
        self._connection.check_one("drain")
        return await self._drain(server_pb2.DRAIN_ACTION_UNDO if undo else server_pb2.DRAIN_ACTION_START)

    async def drain_state(self) -> DrainState:
        """Return the progress of a drain without starting one; not part of the client."""
        self._connection.check_one("drain")
        return await self._drain(server_pb2.DRAIN_ACTION_UNSPECIFIED)

    async def _drain(self, action: server_pb2.DrainAction.ValueType) -> DrainState:
        reply = await self._connection.call(
            self._connection.server_service.Drain, server_pb2.DrainRequest(action=action)
        )
        return from_wire.drain_state(reply)

    async def reload_config(self, *, timeout_s: float = 600.0) -> list[str]:
        """Reload the server's configuration; for its operator.

        Models, data sets, limits and whether tokens are required may change; running calls finish with the
        old configuration. An invalid configuration changes nothing.

        Args:
            timeout_s: Deadline in seconds; new models are loaded before the reply.

        Returns:
            The changes, one line each.

        Raises:
            InvalidArgumentError: The configuration is wrong, or changes a setting that needs a restart.
            ModelError: A new model cannot be loaded; see `load`.
            ScopeMissingError: Your token does not have the scope admin.
        """
        self._connection.check_one("reload_config")
        reply = await self._connection.call(
            self._connection.server_service.ReloadConfig, server_pb2.ReloadConfigRequest(), timeout_s
        )
        return list(reply.changes)

    def page(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        certificate: str | PathLike[str] | None = None,
        key: str | PathLike[str] | None = None,
        insecure: bool = False,
    ) -> Page:
        """Serve a web page of this server from this program, for a browser on the same machine.

            client.page()          # ends a cell with a link
            page = client.page(port=8080)
            page.close()

        The page looks inside models: modules, feature maps, classes. It stays until it is closed or the
        program ends, also when this client is closed. It does not get this client's token: whoever opens
        it is asked for one, where the server wants one.

        Args:
            host: The name or address of this machine where the page listens and is opened. Others can open it
                at one that is not of this machine alone; it then needs a certificate.
            port: Its TCP port; a free one when 0.
            certificate: Chain of the page's own TLS certificate, a PEM file.
            key: Private key of `certificate`, a PEM file without a password.
            insecure: Whether others may open it without TLS, as in a private network.

        Returns:
            The page, with its `url`.

        Raises:
            MissingExtraError: The extra `page` is not installed.
            ValueError: The client is of several servers; the host stands for every address, as "0.0.0.0"
                does; others could open the page without TLS; or the certificate or the key cannot be used.
            OSError: The port cannot be opened.
        """
        self._connection.check_one("page")  # on which one may drain a server, or train there
        from trocar._page.page import Page
        from trocar._page.serving import PageAddress

        return Page(self._connection.options, PageAddress(host, port, certificate, key, insecure))
