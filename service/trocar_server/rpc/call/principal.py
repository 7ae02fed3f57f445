"""Principal of a call: the owner of stored objects."""

from functools import lru_cache

from trocar_server.caller import ANONYMOUS, current_principal, is_unproven
from trocar_server.rpc.call.authorization import principal_from
from trocar_server.rpc.transfer.messages import CallContext

_LOOPBACKS = ("ipv4:127.0.0.1", "ipv6:%5B::1%5D", "ipv6:[::1]")


def principal_of(context: CallContext) -> str:
    """Principal of a call, as determined by the interceptor's authorizer.

    The name of its token or certificate if the server requires one. Otherwise the sha256 of its bearer token,
    if any, or `ANONYMOUS`: the holder of the token is its principal. The token itself is not stored.
    """
    return current_principal() or principal_from(context.invocation_metadata() or ())


@lru_cache(maxsize=1024)
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


@lru_cache(maxsize=1024)
def log_name(principal: str | None) -> str:
    """Principal as logged: of a token's hash only enough to distinguish callers."""
    if principal is None:
        return "-"
    return principal[:12] if is_unproven(principal) else principal
