"""Rank sockets: channels between rank 0 and ranks on other nodes; each end proves that it knows a secret.

    listener = listen("10.0.0.5")                                # at rank 0
    rank, channel = accept(listener, secret)

    channel = connect("10.0.0.5:41873", secret, rank=1)          # on another node

# Note: [What a rank proves]
The secret is made for one launch and reaches the ranks through Ray. Both ends answer the other's random
number with HMAC-SHA256, so that neither can be repeated later. Nothing is read as a message before. What
follows is neither encrypted nor signed, as between gateways and replicas: the network is private.
"""

import hmac
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

_NUMBER_BYTES = 32
_RANK_BYTES = 4
_HANDSHAKE_S = 5.0
"""For the whole of it."""
_SILENT_S, _PROBE_S, _PROBE_COUNT = 10, 5, 3
"""Seconds without a word, and between probes, after which a node counts as gone: 25 s in all."""


def listen(host: str) -> socket.socket:
    """Return a socket that listens on a free port of an address of this node.

    Raises:
        OSError: The address cannot be used.
    """
    return socket.create_server((host, 0))


def address_of(listener: socket.socket) -> str:
    """Return where a socket listens, as `host:port`."""
    host, port = listener.getsockname()[:2]
    return f"{host}:{port}"


def accept(listener: socket.socket, secret: str, timeout_s: float) -> tuple[int, Connection] | None:
    """Wait for a rank; returns its number and the channel, or None if none came that knows the secret.

    Args:
        listener: Where it comes.
        secret: What it has to know.
        timeout_s: Seconds to wait.
    """
    listener.settimeout(timeout_s)
    with suppress(OSError):
        result, _ = listener.accept()
        with _closed_on_error(result):
            wire = _Handshake(result, secret)
            number = wire.challenge()
            rank = wire.take(_RANK_BYTES)
            wire.check(b"rank", number + rank)
            wire.prove(b"first", wire.take(_NUMBER_BYTES))
            return int.from_bytes(rank), _channel(result)
    return None


def connect(address: str, secret: str, rank: int) -> Connection:
    """Connect to rank 0.

    Raises:
        OSError: It is not there, or does not know the secret.
    """
    host, _, port = address.rpartition(":")
    result = socket.create_connection((host, int(port)), _HANDSHAKE_S)
    with _closed_on_error(result):
        wire, own = _Handshake(result, secret), rank.to_bytes(_RANK_BYTES)
        number = wire.take(_NUMBER_BYTES)
        result.sendall(own)
        wire.prove(b"rank", number + own)
        wire.check(b"first", wire.challenge())
        return _channel(result)


class _Handshake:
    """One end of a handshake, with a deadline for all of it."""

    def __init__(self, wire: socket.socket, secret: str) -> None:
        self._wire, self._secret = wire, secret.encode()
        self._until = time.monotonic() + _HANDSHAKE_S
        wire.settimeout(_HANDSHAKE_S)

    def challenge(self) -> bytes:
        """Send a random number and return it."""
        number = secrets.token_bytes(_NUMBER_BYTES)
        self._wire.sendall(number)
        return number

    def prove(self, role: bytes, number: bytes) -> None:
        """Send the proof for the other end's number."""
        self._wire.sendall(self._proof(role, number))

    def check(self, role: bytes, number: bytes) -> None:
        """Take the proof for an own number.

        Raises:
            ConnectionRefusedError: It is wrong.
        """
        expected = self._proof(role, number)
        if not hmac.compare_digest(self.take(len(expected)), expected):
            raise ConnectionRefusedError("the other end does not know the secret")

    def take(self, count: int) -> bytes:
        """Take bytes.

        Raises:
            OSError: They do not come in time.
        """
        taken = b""
        while len(taken) < count:
            left_s = self._until - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("the other end is silent")
            self._wire.settimeout(left_s)
            part = self._wire.recv(count - len(taken))
            if not part:
                raise ConnectionResetError("the other end has gone")
            taken += part
        return taken

    def _proof(self, role: bytes, number: bytes) -> bytes:
        return hmac.digest(self._secret, role + number, "sha256")


@contextmanager
def _closed_on_error(wire: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        wire.close()
        raise


def _channel(wire: socket.socket) -> Connection:
    """Return a socket as a channel; a node that vanishes ends it."""
    wire.settimeout(None)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _SILENT_S),
        ("TCP_KEEPINTVL", _PROBE_S),
        ("TCP_KEEPCNT", _PROBE_COUNT),
        # While something is unacknowledged, Linux sends no probes. Each end reads as soon as the other sends
        # much; small messages fit into its buffers.
        ("TCP_USER_TIMEOUT", 1000 * (_SILENT_S + _PROBE_S * _PROBE_COUNT)),
    ):
        if hasattr(socket, name):  # not on every system
            wire.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(wire.detach())
