"""Who calls: what stored things belong to."""

import hashlib
import re
from collections.abc import Iterable
from typing import Any

from trocar_server.models import ANONYMOUS, current_principal

_SCHEME = "bearer"
_LOOPBACKS = ("ipv4:127.0.0.1", "ipv6:%5B::1%5D", "ipv6:[::1]")
_HASH = re.compile(r"[0-9a-f]{64}")


def principal_of(context: Any) -> str:
    """Return who makes a call, as the interceptor's gate found it.

    The name of its token or certificate where the server asks for one. Otherwise the sha256 of whatever
    bearer token it brings, or `ANONYMOUS`: whoever holds the token is its principal. The token itself is
    kept nowhere.
    """
    return current_principal() or principal_from(context.invocation_metadata() or ())


def principal_from(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return whom the metadata of a call name, where tokens are not checked; see `principal_of`."""
    token = bearer_token(metadata)
    if token is None:
        return ANONYMOUS
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def flow_of(principal: str, peer: str) -> str:
    """Return with whom a call shares its part of the server's time; see `current_flow`.

    A principal is one, however many connections it has. Anonymous callers are told apart by their address;
    those of this very machine, who have the same one, by their connection.

    Args:
        principal: Who calls.
        peer: gRPC's name for the other end, for example `ipv4:127.0.0.1:52034`.
    """
    if principal != ANONYMOUS:
        return principal
    address = peer.rpartition(":")[0]
    is_remote = peer.startswith(("ipv4:", "ipv6:")) and address not in _LOOPBACKS
    return f"{ANONYMOUS} {address if is_remote else peer}"


def bearer_token(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Return the token that the metadata of a call bring, or None."""
    for key, value in metadata:
        if key.lower() != "authorization" or not isinstance(value, str):
            continue
        scheme, _, token = value.strip().partition(" ")
        if scheme.lower() == _SCHEME and token.strip():
            return token.strip()
    return None


def log_name(principal: str | None) -> str:
    """Return what the log says of a principal: of a hash of a token only what tells callers apart."""
    if principal is None:
        return "-"
    return principal[:12] if _HASH.fullmatch(principal) else principal
