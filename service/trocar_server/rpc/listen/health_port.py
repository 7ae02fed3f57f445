"""Health port: health checks in plain text, since probes of Kubernetes speak no TLS and have no token."""

from dataclasses import dataclass
from typing import Any

import grpc

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.rpc.call.authorization import Metadata
from trocar_server.rpc.call.interceptor import CallInterceptor
from trocar_server.rpc.listen.binding import why_not_bound
from trocar_server.rpc.listen.health_service import HealthService
from trocar_server.rpc.listen.unix_socket import host_port, socket_path
from trocar_server.rpc.transfer.messages import CallContext

LIVE = "trocar.live"
"""Service for liveness probes: SERVING as soon as the server answers, while models are still loading."""

_LOOPBACK = "127.0.0.1"
_MAX_MESSAGE_BYTES = 1 << 10


@dataclass(frozen=True)
class HealthAuthorizer:
    """Authorizes health checks for every caller, and nothing else."""

    is_guarded: bool = True

    def check_early(self, method: str, metadata: Metadata) -> None:
        """Deny every other method; see `Authorizer`."""
        raise ServiceError(ErrorReason.UNIMPLEMENTED, "this port answers health checks only")

    def admit(self, method: str, context: CallContext) -> str:
        """Deny every other method; see `Authorizer`."""
        raise ServiceError(ErrorReason.UNIMPLEMENTED, "this port answers health checks only")


async def start_health_port(
    service: HealthService, host: str, port: int, log: Any = None
) -> tuple[grpc.aio.Server, int]:
    """Start a server for `grpc.health.v1` alone; returns the server and its port.

    Args:
        service: The health service; the same as on the main port.
        host: Address to listen on; loopback where it is a Unix socket.
        port: TCP port, 0 for a free one.
        log: structlog's logger `trocar` when None.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, the address cannot be used.
    """
    bound_host = _LOOPBACK if socket_path(host) else host
    address = host_port(bound_host, port)
    options: list[tuple[str, Any]] = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ]
    server = grpc.aio.server(options=options, interceptors=[CallInterceptor(log, HealthAuthorizer())])
    server.add_generic_rpc_handlers((service.handler(),))
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT,
            f"cannot listen on {address} (health_port); {why_not_bound(bound_host, port)}",
        ) from None
    await server.start()
    return server, bound
