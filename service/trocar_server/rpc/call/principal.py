"""Principal of a call: the owner of stored objects."""

import hashlib
from collections.abc import Iterable

from trocar_server.caller import ANONYMOUS, current_principal, is_unproven
from trocar_server.rpc.transfer.messages import CallContext

_SCHEME = "bearer"
_LOOPBACKS = ("ipv4:127.0.0.1", "ipv6:%5B::1%5D", "ipv6:[::1]")


def principal_of(context: CallContext) -> str:
    """Principal of a call, as determined by the interceptor's authorizer.

    The name of its token or certificate if the server requires one. Otherwise the sha256 of its bearer token,
    if any, or `ANONYMOUS`: the holder of the token is its principal. The token itself is not stored.
    """
    return current_principal() or principal_from(context.invocation_metadata() or ())


def principal_from(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Principal by the metadata of a call, if tokens are not checked; see `principal_of`."""
    token = bearer_token(metadata)
    if token is None:
        return ANONYMOUS
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def flow_of(principal: str, peer: str) -> str:
    """Flow of a call, the unit of fair scheduling; see `current_flow`.

    A principal is one flow, however many connections it has. Anonymous callers are distinguished by their
    address; those on this machine, which share one, by their connection.

    Args:
        principal: The caller.
        peer: gRPC's name for the other end, for example `ipv4:127.0.0.1:52034`.
    """
    if principal != ANONYMOUS:
        return principal
    address = peer.rpartition(":")[0]
    is_remote = peer.startswith(("ipv4:", "ipv6:")) and address not in _LOOPBACKS
    return f"{ANONYMOUS} {address if is_remote else peer}"


def bearer_token(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    """Bearer token in the metadata of a call, or None."""
    for key, value in metadata:
        if key.lower() != "authorization" or not isinstance(value, str):
            continue
        scheme, _, token = value.strip().partition(" ")
        if scheme.lower() == _SCHEME and token.strip():
            return token.strip()
    return None


def log_name(principal: str | None) -> str:
    """Principal as logged: of a token's hash only enough to distinguish callers."""
    if principal is None:
        return "-"
    return principal[:12] if is_unproven(principal) else principal
