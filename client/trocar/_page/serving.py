"""Serving the page over HTTP."""

import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

from trocar._page.gateway import Gateway
from trocar._page.origins import Origins
from trocar._transport.channel import ConnectOptions, open_async_channel

HEADER_TIMEOUT_S = 10.0
"""How long a connection may take for a request's headers, and may be idle between requests."""

_EVERY_ADDRESS = ("", "0.0.0.0", "::")
_MAX_HEADER_BYTES = 16 << 10


@dataclass(frozen=True)
class PageAddress:
    """Where the page listens.

    Args:
        host: An address of this machine.
        port: 0 for a free one.

    Raises:
        ValueError: The host stands for every address of this machine. The page refuses names that are not its
            own, so that one must be given.
    """

    host: str
    port: int

    def __post_init__(self) -> None:
        if self.host in _EVERY_ADDRESS:
            one = "the one address under which it is opened, such as 192.168.0.5"
            raise ValueError(f"the page needs {one}, not {self.host!r}")


def listen(address: PageAddress) -> socket.socket:
    """Open the port.

    Raises:
        OSError: It is in use, or the host is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    return socket.create_server((address.host, address.port), family=family)


async def serve_page(
    options: ConnectOptions,
    address: PageAddress,
    announce: Callable[[str], None],
    stopped: Callable[[], Awaitable[None]],
) -> None:
    """Serve the page of a server until stopped.

    Args:
        options: Connection to the server.
        address: Where the page listens.
        announce: Gets the page's URL once it can be opened.
        stopped: Returns when the page should stop.

    Raises:
        OSError: The port cannot be opened.
    """
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    listener = listen(address)
    port = listener.getsockname()[1]
    config = Config()
    config.bind = [f"fd://{listener.detach()}"]  # Hypercorn closes it
    config.alpn_protocols = ["http/1.1"]
    config.keep_alive_timeout = HEADER_TIMEOUT_S
    config.h11_max_incomplete_size = _MAX_HEADER_BYTES
    config.include_server_header = False
    config.errorlog = None
    origins = Origins.at(address.host, port)
    channel = open_async_channel(options)
    try:
        name = f"[{address.host}]" if ":" in address.host else address.host
        announce(f"{origins.url(name)}:{port}/")
        app = cast("Any", Gateway(channel, origins))  # Hypercorn's types name every event
        await serve(app, config, shutdown_trigger=stopped)
    finally:
        await channel.close()
