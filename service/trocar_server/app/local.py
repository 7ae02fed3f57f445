"""In-process server, which the client finds through the entry-point group `trocar.local`.

    server = start_local(["resnet18=random:0"])
    server.target                              # unix:/tmp/trocar-x1/socket
    server.stop()

It has its own event loop and its own owner thread of torch, and listens on a Unix socket in a folder that
only this user can enter. All of its threads are daemons: a program that does not stop it still exits. Its
state (trainers, data sets, stored edits) is in that folder and is removed with it, unless the caller names a
`data_dir`. It shares nothing with other servers but downloaded weights.

If the program computes with torch on the CPU, too, both run at about half their speed (resnet18 in the
main thread: 27 instead of 15 ms, on two cores) until the server is stopped: see `engine.schedule.device`.

Like every gRPC server it does not survive a fork: a child process must start its own.
"""

import asyncio
import atexit
import logging
import os
import queue
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
from trocar_server.app import app
from trocar_server.app.local_models import read_models
from trocar_server.app.log_format import stderr_log
from trocar_server.config import ServerConfig, read_config, resolve_files
from trocar_server.errors import ServiceError
from trocar_server.rpc.listen.unix_socket import target_of

OPTIONS = ("device", "threads", "data_dir", "cache_dir", "limits")
"""Settings that a caller may choose; the others are for servers reachable over a network."""

_GRACE_S = 0.5  # with 0, gRPC cancels where there is nothing to cancel, and prints a line about it
_STOP_TIMEOUT_S = 10.0
_THREADS = 8
_LOGGER = "trocar"
_running: set["LocalServer"] = set()


def start_local(
    models: str | Sequence[str] | Mapping[str, Any] = (), options: Mapping[str, Any] | None = None
) -> "LocalServer":
    """Start a server on a thread of this process and wait until it has loaded its models.

    Args:
        models: See `read_models`.
        options: Settings of `[server]`: `device`, `threads`, `data_dir`, `cache_dir`, `limits`. Environment
            variables `TROCAR_...` apply as for `trocar serve`, except `TROCAR_DATA_DIR`, which belongs to
            another server.

    Raises:
        ServiceError: An option is wrong or a model cannot be loaded; nothing is left running.
    """
    chosen = read_models(models)
    folder = Path(tempfile.mkdtemp(prefix="trocar-"))  # mode 0700
    try:
        config = _config(folder, chosen.tables, options or {})
        server = LocalServer(config, chosen.factories, folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    server.start()
    return server


class LocalServer:
    """A server on a thread of this process.

    Args:
        config: What to host; `host` is a Unix socket in `folder`.
        factories: See `app.start`.
        folder: The server's own folder; removed once it has stopped.
    """

    def __init__(
        self, config: ServerConfig, factories: Mapping[str, Callable[[], Any]], folder: Path
    ) -> None:
        self.target = target_of(folder / "socket")
        self._folder = folder
        self._process_id = os.getpid()
        self._ready: Future[None] = Future()
        self._app: app.App | None = None
        self._is_kept = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._serve, args=(config, factories), name="trocar-local", daemon=True
        )

    def start(self) -> None:
        """Start the server and wait until every model is loaded.

        Raises:
            ServiceError: What `app.start` raises. The server then stops by itself, as after Ctrl-C.
        """
        _running.add(self)
        self._thread.start()
        try:
            self._ready.result()
        except Exception:
            self._thread.join(_STOP_TIMEOUT_S)
            raise
        except BaseException:  # Ctrl-C: do not wait for a download to end
            self.request_stop()
            raise

    def request_stop(self) -> None:
        """Request a stop without waiting for it; no effect once stopped."""
        if os.getpid() == self._process_id:  # a forked child only has the parent's socket
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._cancel)

    def stop(self) -> None:
        """Cancel its calls, stop it and wait for its end; at most 10 s if a pass cannot be stopped."""
        self.request_stop()
        self._thread.join(_STOP_TIMEOUT_S)

    def stop_fits(self) -> None:
        """Stop its fits; called when the program begins to exit."""
        if self._app is None or os.getpid() != self._process_id:
            return
        work = self._app.fits.stop(is_saving=self._is_kept)
        try:
            asyncio.run_coroutine_threadsafe(work, self._loop).result(_STOP_TIMEOUT_S)
        except (RuntimeError, TimeoutError):  # the loop is closed, or a pass cannot be stopped
            work.close()

    def _cancel(self) -> None:
        self._main.cancel()

    def _serve(self, config: ServerConfig, factories: Mapping[str, Callable[[], Any]]) -> None:
        """Thread main. The stop must not start threads: Python refuses that at exit."""
        loop = self._loop
        executor = DaemonExecutor(_THREADS)
        loop.set_default_executor(executor)
        try:
            with _quiet:
                self._main = loop.create_task(self._run(config, factories))
                loop.run_until_complete(self._main)
        except BaseException as error:  # noqa: BLE001 - re-raised in the thread that waits for the start
            if not self._ready.done():
                self._ready.set_exception(error)
        finally:
            executor.shutdown()
            loop.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            _running.discard(self)

    async def _run(self, config: ServerConfig, factories: Mapping[str, Callable[[], Any]]) -> None:
        running = await app.start(config, factories, stderr_log(logging.WARNING))
        self._app, self._is_kept = running, self._folder not in config.data_dir.parents
        self._ready.set_result(None)
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await _end(running, is_kept=self._is_kept)


class DaemonExecutor(ThreadPoolExecutor):
    """Executor of daemon threads, all started at construction.

    Threads of `ThreadPoolExecutor` start on demand, and accept no work once the interpreter begins to exit: a
    server that is stopped then could no longer write or release anything.

    Args:
        thread_count: The number of threads.
    """

    def __init__(self, thread_count: int) -> None:
        super().__init__(1)
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        names = (f"trocar-local-{index}" for index in range(thread_count))
        self._all = [threading.Thread(target=self._serve, name=name, daemon=True) for name in names]
        for thread in self._all:
            thread.start()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function on one of the threads."""
        future: Future[Any] = Future()
        self._work.put(lambda: _settle(future, lambda: fn(*args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop the threads once they have completed the submitted work."""
        for _ in self._all:
            self._work.put(None)
        for thread in self._all if wait else ():
            thread.join()

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # otherwise its result stays alive until the next item


def _settle(future: Future[Any], call: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - handed to the waiting caller
        future.set_exception(error)


async def _end(running: app.App, *, is_kept: bool) -> None:
    """Stop calls, fits and trainers, and unlock the data directory.

    Args:
        running: The app to stop.
        is_kept: Whether the data directory may be used later; if so, fits and trainers are saved.
    """
    running.lifecycle.stop()
    await running.rpc.stop(_GRACE_S)
    await running.fits.stop(is_saving=is_kept)
    await _cancel_others()
    await running.trainers.stop(is_saving=is_kept)
    running.engine.preparation.stop()
    await running.engine.compiled.stop()
    running.engine.owner.stop()
    await asyncio.get_running_loop().shutdown_asyncgens()


def _config(
    folder: Path, models: Mapping[str, Mapping[str, Any]], options: Mapping[str, Any]
) -> ServerConfig:
    unknown = [key for key in options if key not in OPTIONS]
    if unknown:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT,
            f"a local server has no option {', '.join(map(repr, unknown))}; it has {', '.join(OPTIONS)}",
        )
    # No other user can enter its folder, whatever the environment sets for servers on a network.
    alone: dict[str, Any] = {"tokens": False, "tls_cert": None, "tls_key": None, "tls_client_ca": None}
    alone |= {"metrics_port": None, "otel_endpoint": "", "health_port": None, "strict": True}
    alone |= {"page": {"enabled": False}}
    shared = read_config(**options).weights_dir
    own = {"data_dir": folder / "data", "cache_dir": shared, **options}
    return read_config(host=f"unix:{folder / 'socket'}", models=_with_absolute_paths(models), **alone, **own)


def _with_absolute_paths(models: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Resolve relative files of models now: the program may change its working directory."""
    tables = {
        model_id: {key: str(value) if isinstance(value, Path) else value for key, value in table.items()}
        for model_id, table in models.items()
    }
    resolve_files({"models": tables}, Path.cwd())
    return tables


async def _cancel_others() -> None:
    """End every other task, a call in the middle of a pass for example, and wait for its end.

    The tasks of gRPC were cancelled by its stop and are waited for: it prints a traceback where somebody else
    cancels them as they end.
    """
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    calls = {task for task in tasks if _is_of_grpc(task)}
    await _cancelled(tasks - calls)
    if calls:
        _, late = await asyncio.wait(calls, timeout=_STOP_TIMEOUT_S)
        await _cancelled(late)


async def _cancelled(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _is_of_grpc(task: "asyncio.Task[Any]") -> bool:
    return str(getattr(task.get_coro(), "__module__", "")).startswith("grpc.")


class _QuietLogger:
    """Logger for the server's modules: warnings go to standard error, the rest is dropped."""

    def debug(self, line: str) -> None:
        """Drop a line."""

    info = debug

    def warning(self, line: str) -> None:
        """Print a line."""
        print(line, file=sys.stderr)

    error = critical = exception = warning


class _Quiet:
    """Silences the server's modules in the program's output while servers run in it.

    Otherwise structlog prints every line to standard output, which is the notebook. Loggers of other names,
    and a structlog that the program has configured, are unchanged.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._before: Callable[..., Any] | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            if not structlog.is_configured():
                self._before = structlog.get_config()["logger_factory"]
                structlog.configure(logger_factory=self._logger)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if not self._count and structlog.get_config()["logger_factory"] == self._logger:
                structlog.reset_defaults()

    def _logger(self, *names: Any) -> Any:
        if names == (_LOGGER,) or self._before is None:
            return _QuietLogger()
        return self._before(*names)


_quiet = _Quiet()


def _stop_all() -> None:
    for server in list(_running):
        server.stop()


def _stop_fits() -> None:
    for server in list(_running):
        server.stop_fits()


atexit.register(_stop_all)
# Before `atexit` Python ends every `ThreadPoolExecutor`, those that read ahead for fits among them, and waits
# for non-daemon threads, which may continue to call. There is no public hook for that moment (CPython 3.9 to
# 3.14).
getattr(threading, "_register_atexit", lambda _: None)(_stop_fits)
