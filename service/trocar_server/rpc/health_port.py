"""A port of its own for health checks, in plain text: probes of Kubernetes speak no TLS and have no token."""

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.rpc.unix_socket import socket_path

LIVE = "trocar.live"
"""Serves as soon as the server answers at all, while models are still being loaded: for liveness probes."""

_MAX_CALLS = 64
"""At once; strangers reach this port, and a `Watch` lasts as long as its caller likes."""

_LOOPBACK = "127.0.0.1"
_MAX_MESSAGE_BYTES = 1 << 10


async def start_health_port(
    service: health.aio.HealthServicer, host: str, port: int
) -> tuple[grpc.aio.Server, int]:
    """Answer `grpc.health.v1` there, and nothing else; returns the server and its port.

    Args:
        service: What answers; the same as on the main port.
        host: Address to listen on; loopback where it is a Unix socket.
        port: TCP port, 0 for a free one.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, the address cannot be used.
    """
    address = f"{_LOOPBACK if socket_path(host) else host}:{port}"
    options: list[tuple[str, Any]] = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
    ]
    server = grpc.aio.server(options=options, maximum_concurrent_rpcs=_MAX_CALLS)
    health_pb2_grpc.add_HealthServicer_to_server(service, server)
    try:
        bound = server.add_insecure_port(address)
    except RuntimeError:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT,
            f"cannot listen on {address} (health_port); is something running there?",
        ) from None
    await server.start()
    return server, bound
