"""In-process server: `connect("local")`, if the server's package is installed.

It is found through the entry-point group `trocar.local`: the client never imports the server.
"""

import asyncio
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Protocol, TypeAlias
from weakref import finalize

from trocar.errors import EXCEPTIONS, MissingExtraError, ServerUnavailableError
from trocar_api.reasons import ErrorReason

GROUP = "trocar.local"
_OF_TORCH = ("torch", "torchvision")

LocalModels: TypeAlias = Any
"""Names of models, modules, or a sequence of both; or by model id weights, tables of settings or modules.

A module is an `nn.Module`, which the client cannot name: it does not import torch."""


class LocalServer(Protocol):
    """A server in this process."""

    target: str
    """Where it listens, `unix:/path`."""

    def request_stop(self) -> None:
        """Request a stop, without waiting for it."""
        ...

    def stop(self) -> None:
        """Stop it and wait for its end; no effect if it has stopped."""
        ...


def start_local(models: LocalModels, options: Mapping[str, Any] | None) -> LocalServer:
    """Start a server in this process and wait until it has loaded its models.

    Raises:
        MissingExtraError: PyTorch or the server's package is not installed.
        ServerUnavailableError: The server does not run on this system.
        TrocarError: The server's error about models or options.
    """
    start = _find_start()
    try:
        return start(models, options)
    except Exception as error:
        reason = getattr(error, "reason", None)
        if not isinstance(reason, ErrorReason):
            raise
        raise EXCEPTIONS[reason](str(error), details=getattr(error, "details", None)) from None


def stop_with(owner: object, server: LocalServer) -> None:
    """Stop the server when its owner is dropped without being closed, as in a notebook's cell."""
    finalize(owner, server.request_stop).atexit = False  # the server stops itself at the interpreter's exit


async def async_stop(server: LocalServer) -> None:
    """Stop a server and wait for its end without blocking the event loop."""
    await asyncio.to_thread(server.stop)


def stop(server: LocalServer) -> None:
    """Stop a server and wait for its end."""
    server.stop()


def _find_start() -> Callable[[LocalModels, Mapping[str, Any] | None], LocalServer]:
    missing = "trocar_server"
    if find_spec("torch") is None:
        missing = "torch"
    from importlib.metadata import entry_points  # late: it takes 20 ms

    for entry in entry_points(group=GROUP):
        try:
            start: Callable[[LocalModels, Mapping[str, Any] | None], LocalServer] = entry.load()
        except ModuleNotFoundError as error:
            missing = missing if missing in _OF_TORCH else error.name or missing
            break
        except ImportError as error:  # the server says why it does not run here
            raise ServerUnavailableError(f'connect("local"): {error}') from None
        return start
    what = "PyTorch" if missing in _OF_TORCH else f"{missing!r}, a part of the server,"
    raise MissingExtraError(
        f'connect("local") runs the server in this process, and {what} is not installed: '
        'pip install "trocar[server]"'
    )
