"""Calls that a gateway of the cluster forwards: with the peer and certificate of the gateway's caller.

A gateway proves itself with the cluster's key; without it the same metadata means nothing. A gateway removes
such metadata of its own callers.
"""

import hmac
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from trocar_server.rpc.transfer.messages import CallContext

KEY, PEER, CERTIFICATE = "x-trocar-cluster-key", "x-trocar-caller-peer", "x-trocar-caller-certificate-bin"

_Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True)
class GatewayAccess:
    """Access of gateways to a replica."""

    host: str = ""
    """Address to listen on as well, in plain text at a free port; none when empty."""
    key: str = ""
    """The cluster's key; gateways without it are callers like others."""


class ForwardedCall:
    """gRPC's context of a call, with peer and certificate of the gateway's caller; otherwise as it is."""

    def __init__(self, context: CallContext, peer: str, certificate: Mapping[str, list[bytes]]) -> None:
        self._context, self._peer, self._certificate = context, peer, certificate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def peer(self) -> str:
        """Return gRPC's name for the caller."""
        return self._peer

    def auth_context(self) -> Mapping[str, list[bytes]]:
        """Return the properties of the caller's certificate; empty without one."""
        return self._certificate


def caller_metadata(key: str, context: CallContext) -> tuple[tuple[str, str | bytes], ...]:
    """Return what a gateway adds to the metadata of a call."""
    properties = {name: [value.decode("latin-1") for value in values] for name, values in _names(context)}
    return ((KEY, key), (PEER, context.peer()), (CERTIFICATE, json.dumps(properties).encode()))


def without_claims(metadata: _Metadata) -> list[tuple[str, str | bytes]]:
    """Return metadata of a caller without keys that only a gateway may send."""
    return [(name, value) for name, value in metadata if name not in (KEY, PEER, CERTIFICATE)]


def original(context: CallContext, key: str) -> CallContext:
    """Return the context of a call as its caller made it; as it is if no gateway forwarded it."""
    result = dict(context.invocation_metadata() or ()) if key else {}
    claimed = result.get(KEY)
    if not isinstance(claimed, str) or not hmac.compare_digest(claimed.encode(), key.encode()):
        return context
    properties = json.loads(result[CERTIFICATE])
    certificate = {name: [value.encode("latin-1") for value in values] for name, values in properties.items()}
    forwarded: Any = ForwardedCall(
        context, str(result[PEER]), certificate
    )  # what is not its own it delegates
    return cast("CallContext", forwarded)


def _names(context: CallContext) -> Iterable[tuple[str, Iterable[bytes]]]:
    result: Mapping[str, Iterable[bytes]] = context.auth_context() or {}
    return ((name, values) for name, values in result.items() if name.startswith(("x509_", "peer_")))
