"""Connection failures: why no server was reached, and the cure, by gRPC's text.

    no connection to gpu1:50051: nothing listens on this port; is the server running there?

gRPC's own text is for programmers; it stays in the detail `grpc` of the error.
"""

import re
import socket
import ssl
from contextlib import suppress

from trocar._transport.targets import DEFAULT_PORT, host_of
from trocar._transport.tls_mistakes import tls_advice

_PROBE_S = 0.3
"""Seconds for one look at a port of this machine."""
_BY_TEXT: tuple[tuple[str, str], ...] = (
    (
        "name not found|lookup failed|Name or service not known|nodename nor servname|No address associated",
        "no host of this name is found; check the name",
    ),
    (
        "Trying to connect an http1",
        f"a web server answers there; the gRPC port is another, by default {DEFAULT_PORT}",
    ),
    ("No such file or directory", "there is no socket of this name; is the server running?"),
    ("Permission denied", "the socket belongs to another user"),
    ("Connection refused", "nothing listens on this port; is the server running there?"),
    (
        "timed out|timeout|FD Shutdown|Deadline|handshaker shutdown",
        "the host does not answer; check the address, the port and firewalls",
    ),
    ("unreachable|No route to host", "there is no route to this host; check the address and the network"),
    (
        r"Socket closed|Connection reset|Broken pipe|recvmsg|GOAWAY|\bping",
        "the connection broke; is the server running there?",
    ),
    (
        "Failed parsing HTTP/2|Expected SETTINGS frame",
        "something else than gRPC answers there, perhaps a web server or the metrics; the gRPC port is "
        f"another, by default {DEFAULT_PORT}",
    ),
    ("closed channel|Channel closed|channel is closed", "the client is closed"),
)
_OF_ONE_ADDRESS = re.compile(r"ipv6:(%5B|\[)::1.*Connection refused", re.IGNORECASE | re.DOTALL)
"""gRPC reports the last address of a name: of `localhost` the one of IPv6, where often nothing listens."""
_OF_WEB = re.compile(r"http2 header with status: (\d+)")
"""A web server or a proxy answers calls of gRPC with a status of HTTP."""
_KEPT_STATUSES = ("401", "403", "429")
"""Of these gRPC's own code says as much: no token, no permission, too many calls."""


def connection_problem(text: str, target: str, *, is_tls: bool) -> str:
    """Return why no server was reached, and what to do.

    Args:
        text: What gRPC says.
        target: The target of the call.
        is_tls: Whether this end speaks TLS.
    """
    if advice := tls_advice(text, is_tls=is_tls):
        return advice
    if _OF_ONE_ADDRESS.search(text) and (advice := _other_address(target, is_tls=is_tls)):
        return advice
    if status := web_status(text):
        return _of_web(status)
    words = next((words for pattern, words in _BY_TEXT if re.search(pattern, text, re.IGNORECASE)), "")
    return words or f"is the server running there? ({text})"


def web_status(text: str) -> str:
    """Return the status of HTTP that a web server answered with; empty if none did."""
    match = _OF_WEB.search(text)
    return match[1] if match is not None and match[1] not in _KEPT_STATUSES else ""


def _of_web(status: str) -> str:
    if status.startswith("5"):
        return f"a proxy answers there with status {status}; is the server behind it running?"
    return (
        f"a web server answers there (status {status}), perhaps the page; the gRPC port is another, by "
        f"default {DEFAULT_PORT}"
    )


def _other_address(target: str, *, is_tls: bool) -> str:
    """Look at the IPv4 address of a name whose IPv6 address refused, and return what is wrong there.

    A server of gRPC in plain text would have answered a call in plain text.
    """
    address = target.removeprefix("dns:").rpartition("/")[2]
    host, port = host_of(address), address.rpartition(":")[2]
    if host != "localhost" or not port.isdecimal():
        return ""
    speaks_tls = _speaks_tls(int(port))
    if speaks_tls is None:
        return ""
    if is_tls:
        return tls_advice("CERTIFICATE_VERIFY_FAILED" if speaks_tls else "WRONG_VERSION_NUMBER", is_tls=True)
    if speaks_tls:
        return tls_advice("failed to connect: Socket closed", is_tls=False)
    return next(words for pattern, words in _BY_TEXT if pattern.startswith("Failed parsing HTTP/2"))


def _speaks_tls(port: int) -> bool | None:
    """Whether a server of this machine speaks TLS; None if nothing listens."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        plain = socket.create_connection(("127.0.0.1", port), timeout=_PROBE_S)
    except OSError:
        return None
    with plain, suppress(OSError), context.wrap_socket(plain):  # ssl's errors are OSErrors, too
        return True
    return False
