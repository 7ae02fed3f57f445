"""Drain and version checks: calls that are accepted, independent of the caller."""

from dataclasses import dataclass

from trocar_api.reasons import ErrorReason
from trocar_api.versions import VERSION_KEY, is_understood
from trocar_server import __version__
from trocar_server.auth import Scope
from trocar_server.errors import ServiceError
from trocar_server.rpc.call.authorization import Authorizer, Metadata
from trocar_server.rpc.call.method_scopes import METHOD_SCOPES

OWN = "/trocar_api."
"""Prefix of the methods of our own API."""

_SERVER = "/trocar_api.v1.ServerService/"
_LEADS_OUT = frozenset(
    (
        "/trocar_api.v1.TrainerService/SaveTrainer",
        "/trocar_api.v1.TrainerService/ExportTrainer",
        "/trocar_api.v1.TrainerService/CloseTrainer",
    )
)
"""Methods that a draining server still accepts, besides read-only ones."""

_LEASES = frozenset(
    ("/trocar_api.v1.SharedMemoryService/ShareMemory", "/trocar_api.v1.PreparedCallService/PrepareCalls")
)
"""Methods whose calls last as long as their client, and only lend something to its other calls."""


@dataclass
class DrainSwitch:
    """Drain state: whether new work is accepted."""

    is_draining: bool = False

    def check(self, method: str, metadata: Metadata) -> None:
        """Refuse calls of an unsupported version, and new work while draining; independent of the caller.

        Raises:
            ServiceError: `VERSION_SKEW` or `SERVER_DRAINING`.
        """
        if method.startswith(OWN):
            client = dict(metadata).get(VERSION_KEY, "")
            if client != __version__:
                _check_version(client if isinstance(client, str) else "")
        if self.is_draining and is_work(method):
            raise ServiceError(
                ErrorReason.SERVER_DRAINING,
                "the server is draining and accepts no new work; connect to another server, or try again "
                "later",
            )


def is_work(method: str) -> bool:
    """Whether a method is work that a draining server refuses."""
    is_looking = METHOD_SCOPES.get(method, Scope.READ) is Scope.READ
    return not (is_looking or method.startswith(_SERVER) or method in _LEADS_OUT)


def is_pending_work(method: str) -> bool:
    """Whether a running call of a method is work that a draining server waits for."""
    return is_work(method) and method not in _LEASES


def refused_unknown(authorizer: Authorizer, method: str, metadata: Metadata) -> ServiceError:
    """Error for an unknown method of our API; unauthorized callers do not learn our version."""
    try:
        authorizer.check_early(method, metadata)
    except ServiceError as error:
        if error.reason is not ErrorReason.SCOPE_MISSING:
            return error
    return unknown_method(method)


def unknown_method(method: str) -> ServiceError:
    """Error for an unknown method of our API."""
    return ServiceError(
        ErrorReason.UNKNOWN_METHOD,
        f"this server is of version {__version__} and has no {method.rpartition('/')[2][:80]}; update it, or "
        f"use a client of its version: pip install 'trocar=={__version__}'",
        server_version=__version__,
    )


def _check_version(client: str) -> None:
    if is_understood(client, __version__):
        return
    raise ServiceError(
        ErrorReason.VERSION_SKEW,
        f"the client is of version {client[:40]}, this server of {__version__}: it understands clients of "
        "its own major version that are not of a later minor one. Update the server, or use a client of its "
        f"version: pip install 'trocar=={__version__}'",
        client_version=client[:40],
        server_version=__version__,
    )
