"""A server in the caller's own process, which the client finds through the entry-point group `trocar.local`.

    server = start_local(["resnet18=random:0"])
    server.target                              # unix:/tmp/trocar-x1/socket
    server.stop()

It has an event loop and torch's owner thread of its own, and listens on a Unix socket in a folder that
only this user can enter. All of its threads are daemons: a program that forgets to stop it still ends.

Where the program computes with torch on the CPU, too, both go at about half their pace (resnet18 in the
main thread: 27 instead of 15 ms, on two cores) until the server is stopped: see `engine.device`.

It does not survive a fork, like every gRPC server: a child process that needs one starts its own.
"""

import asyncio
import atexit
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from trocar_api.reasons import ErrorReason
from trocar_server import app
from trocar_server.config import ServerConfig, read_config
from trocar_server.errors import ServiceError
from trocar_server.local_models import read_models
from trocar_server.rpc.unix_socket import target_of

OPTIONS = ("device", "threads", "data_dir", "limits")
"""The settings that a caller may choose; the others belong to a server that strangers reach."""

_GRACE_S = 0.5  # without any, gRPC cancels where there is nothing to cancel, and prints a line about it
_STOP_TIMEOUT_S = 10.0
_running: set["LocalServer"] = set()


def start_local(
    models: str | Sequence[str] | Mapping[str, Any] = (), options: Mapping[str, Any] | None = None
) -> "LocalServer":
    """Start a server on a thread of this process and wait until it has loaded its models.

    Args:
        models: See `read_models`.
        options: Settings of `[server]`: `device`, `threads`, `data_dir`, `limits`. Environment variables
            `TROCAR_...` count as for `trocar serve`.

    Raises:
        ServiceError: An option is wrong or a model cannot be loaded; nothing is left running.
    """
    chosen = read_models(models)
    folder = Path(tempfile.mkdtemp(prefix="trocar-"))  # mode 0700
    try:
        config = _config(folder / "socket", chosen.tables, options or {})
        server = LocalServer(config, chosen.factories, folder)
    except BaseException:
        folder.rmdir()
        raise
    server.start()
    return server


class LocalServer:
    """A server on a thread of this process.

    Args:
        config: What to host; `host` is a Unix socket in `folder`.
        factories: See `app.start`.
        folder: Its own; removed when it has stopped.
    """

    def __init__(
        self, config: ServerConfig, factories: Mapping[str, Callable[[], Any]], folder: Path
    ) -> None:
        self.target = target_of(folder / "socket")
        self._folder = folder
        self._process_id = os.getpid()
        self._ready: Future[None] = Future()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._serve, args=(config, factories), name="trocar-local", daemon=True
        )

    def start(self) -> None:
        """Start it and wait until every model is loaded.

        Raises:
            ServiceError: What `app.start` raises. Then, as after Ctrl-C, it ends by itself.
        """
        _running.add(self)
        self._thread.start()
        try:
            self._ready.result()
        except Exception:
            self._thread.join(_STOP_TIMEOUT_S)
            raise
        except BaseException:  # Ctrl-C: whoever asks for it does not wait for a download's end
            self.request_stop()
            raise

    def request_stop(self) -> None:
        """Let it stop without waiting for that; nothing happens when it has stopped."""
        if os.getpid() == self._process_id:  # in a forked child there is nothing but the parent's socket
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._cancel)

    def stop(self) -> None:
        """Cancel its calls, stop it and wait for its end; 10 s where a pass cannot be stopped."""
        self.request_stop()
        self._thread.join(_STOP_TIMEOUT_S)

    def _cancel(self) -> None:
        self._main.cancel()

    def _serve(self, config: ServerConfig, factories: Mapping[str, Callable[[], Any]]) -> None:
        """Be the thread. Nothing in here starts a thread when it stops: at exit Python refuses that."""
        loop = self._loop
        executor = ThreadPoolExecutor(thread_name_prefix="trocar-local")
        loop.set_default_executor(executor)
        try:
            self._main = loop.create_task(self._run(config, factories))
            loop.run_until_complete(self._main)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for the start
            self._ready.set_exception(error)
        finally:
            executor.shutdown()
            loop.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            _running.discard(self)

    async def _run(self, config: ServerConfig, factories: Mapping[str, Callable[[], Any]]) -> None:
        running = await app.start(config, factories, _make_log())
        self._ready.set_result(None)
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await running.rpc.stop(_GRACE_S)
        await _cancel_others()
        running.engine.owner.stop()


def _config(
    socket: Path, models: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any]
) -> ServerConfig:
    unknown = [key for key in options if key not in OPTIONS]
    if unknown:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT,
            f"a local server has no option {', '.join(map(repr, unknown))}; it has {', '.join(OPTIONS)}",
        )
    # Nobody else can enter its folder, whatever the environment says of servers that strangers reach.
    alone: dict[str, Any] = {"tokens": False, "tls_cert": None, "tls_key": None, "tls_client_ca": None}
    alone |= {"metrics_port": None, "otel_endpoint": ""}
    return read_config(host=f"unix:{socket}", models=models, **alone, **options)


async def _cancel_others() -> None:
    """Cancel every other task, a call in the middle of a pass for example, and wait for its end."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _make_log() -> Any:
    """Return a logger of our own: a guest keeps quiet, and leaves structlog as it is set up."""
    return structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
    )


def _stop_all() -> None:
    for server in list(_running):
        server.stop()


atexit.register(_stop_all)
