"""Which calls are let in whoever makes them: those of clients that we understand, while we take work."""

from dataclasses import dataclass

from trocar_api.reasons import ErrorReason
from trocar_api.versions import VERSION_KEY, is_understood
from trocar_server import __version__
from trocar_server.auth import Scope
from trocar_server.errors import ServiceError
from trocar_server.rpc.gates import Gate, Metadata
from trocar_server.rpc.method_scopes import METHOD_SCOPES

OWN = "/trocar_api."
"""How the methods of our own contract begin."""

_SERVER = "/trocar_api.v1.ServerService/"
_LEADS_OUT = frozenset(
    (
        "/trocar_api.v1.TrainerService/SaveTrainer",
        "/trocar_api.v1.TrainerService/ExportTrainer",
        "/trocar_api.v1.TrainerService/CloseTrainer",
    )
)
"""What a caller may want of a server that runs empty, beside looking."""


@dataclass
class Doors:
    """Open or closed for new work."""

    is_draining: bool = False

    def check(self, method: str, metadata: Metadata) -> None:
        """Refuse what cannot be served, whoever asks.

        Raises:
            ServiceError: `VERSION_SKEW` or `SERVER_DRAINING`.
        """
        if method.startswith(OWN):
            _check_version(metadata)
        if self.is_draining and is_work(method):
            raise ServiceError(
                ErrorReason.SERVER_DRAINING,
                "the server runs empty and takes no new work; connect to another one, or try again when this "
                "one is back",
            )


def is_work(method: str) -> bool:
    """Tell whether a method makes work that a server which runs empty does not take."""
    is_looking = METHOD_SCOPES.get(method, Scope.READ) is Scope.READ
    return not (is_looking or method.startswith(_SERVER) or method in _LEADS_OUT)


def refused_unknown(gate: Gate, method: str, metadata: Metadata) -> ServiceError:
    """Return why a method of ours that is none cannot be called: strangers do not learn our version."""
    try:
        gate.check_early(method, metadata)
    except ServiceError as error:
        if error.reason is not ErrorReason.SCOPE_MISSING:
            return error
    return unknown_method(method)


def unknown_method(method: str) -> ServiceError:
    """Build the error for a method of ours that is none."""
    return ServiceError(
        ErrorReason.UNKNOWN_METHOD,
        f"this server is of version {__version__} and has no {method.rpartition('/')[2][:80]}; update it, or "
        f"use a client of its version: pip install 'trocar=={__version__}'",
        server_version=__version__,
    )


def _check_version(metadata: Metadata) -> None:
    client = next((value for key, value in metadata if key == VERSION_KEY and isinstance(value, str)), "")
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
