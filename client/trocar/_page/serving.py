"""Serving the page over HTTP."""

import errno
import socket
import ssl
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from os import PathLike, fspath
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
        host: A name or an address of this machine.
        port: 0 for a free one.
        certificate: Chain of the page's TLS certificate, a PEM file; with it and `key` the page is HTTPS.
        key: Its private key, a PEM file without a password.
        insecure: Whether addresses other than loopback are allowed without TLS.

    Raises:
        ValueError: The host stands for every address of this machine. The page refuses names that are not its
            own, so that one must be given. Or others can reach it, and tokens would be sent in plain text; or
            certificate and key cannot be used.
    """

    host: str
    port: int
    certificate: str | PathLike[str] | None = None
    key: str | PathLike[str] | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.host in _EVERY_ADDRESS:
            one = "the one address under which it is opened, such as 192.168.0.5"
            raise ValueError(f"the page needs {one}, not {self.host!r}")
        if (self.certificate is None) != (self.key is None):
            raise ValueError("the page's certificate and key belong together; give both, or neither")
        if self.certificate is not None and self.key is not None:
            _check_certificate(self.certificate, self.key)
        elif not (self.insecure or _is_loopback(self.host)):
            raise ValueError(
                f"a page on {self.host} would receive tokens in plain text: give it a certificate and a key, "
                "use an SSH tunnel to 127.0.0.1, or allow it where a private network restricts access "
                "(insecure)"
            )

    @property
    def scheme(self) -> str:
        """`http`, or `https` with a certificate."""
        return "http" if self.certificate is None else "https"


def listen(address: PageAddress) -> socket.socket:
    """Open the port.

    Raises:
        OSError: It is in use, or the host is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family)
    except OSError as error:
        problem = {
            errno.EADDRINUSE: f"port {address.port} of {address.host} is in use; choose another for the page",
            errno.EADDRNOTAVAIL: f"{address.host} is not an address of this machine",
        }.get(error.errno or 0)
        if error.errno in (socket.EAI_NONAME, socket.EAI_AGAIN):
            problem = f"no host is called {address.host!r}"
        if problem is None:
            raise
        raise OSError(error.errno, problem) from None


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
    config.h2_max_concurrent_streams = 1  # in plain text it cannot be turned off; the gateway refuses it
    config.keep_alive_timeout = HEADER_TIMEOUT_S
    config.h11_max_incomplete_size = _MAX_HEADER_BYTES
    config.include_server_header = False
    config.errorlog = None
    config.ssl_handshake_timeout = HEADER_TIMEOUT_S
    if address.certificate is not None and address.key is not None:
        config.certfile, config.keyfile = fspath(address.certificate), fspath(address.key)
    origins = Origins.at(address.host, port, scheme=address.scheme)
    channel = open_async_channel(options)
    gateway = Gateway(channel, origins)

    async def ended() -> None:
        """Wait until stopped, and end the calls: Hypercorn would wait, then cancel them as a fault."""
        await stopped()
        gateway.end_calls()

    try:
        name = f"[{address.host}]" if ":" in address.host else address.host
        announce(f"{origins.url(name)}:{port}/")
        app = cast("Any", gateway)  # Hypercorn's types name every event
        await serve(app, config, shutdown_trigger=ended)
    finally:
        await channel.close()


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return False


def _check_certificate(certificate: str | PathLike[str], key: str | PathLike[str]) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=lambda: "")
    except OSError as error:  # ssl's errors are of this kind, too
        is_of_openssl = isinstance(error, ssl.SSLError)  # whose text is of its source
        why = "they cannot be read" if is_of_openssl else error.strerror or type(error).__name__
        raise ValueError(
            f"the page cannot use {fspath(certificate)!r} and {fspath(key)!r}: {why}; both are PEM files "
            "that belong together, the key without a password"
        ) from None
