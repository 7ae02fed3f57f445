"""The gRPC server: services, options, health, start and stop."""

from dataclasses import dataclass

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import extraction_pb2, model_pb2, model_pb2_grpc, server_pb2, server_pb2_grpc, stream_pb2
from trocar_server.config import Limits
from trocar_server.engine.engine import Engine
from trocar_server.errors import ServiceError
from trocar_server.rpc.extraction_service import ExtractionService
from trocar_server.rpc.interceptor import CallInterceptor
from trocar_server.rpc.model_service import ModelService
from trocar_server.rpc.server_service import ServerService
from trocar_server.rpc.stream_service import StreamService

# Inputs of up to 4 MiB come within one message; more room than that is for descriptions.
_MESSAGE_ROOM_BYTES = 8 << 20

_SERVICES = [
    file.services_by_name[name].full_name
    for file, name in (
        (extraction_pb2.DESCRIPTOR, "ExtractionService"),
        (stream_pb2.DESCRIPTOR, "StreamService"),
        (model_pb2.DESCRIPTOR, "ModelService"),
        (server_pb2.DESCRIPTOR, "ServerService"),
    )
]


@dataclass
class RpcServer:
    """A running gRPC server.

    Attributes:
        port: The TCP port that it listens on.
    """

    port: int
    _server: grpc.aio.Server
    _health: health.aio.HealthServicer

    async def set_serving(self) -> None:
        """Tell health checks that every service is ready."""
        for name in ("", *_SERVICES):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, let calls finish for `grace_s` seconds, then end."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


async def start_server(engine: Engine, host: str, port: int, *, with_reflection: bool = False) -> RpcServer:
    """Start listening; health says NOT_SERVING until `set_serving`.

    Raises:
        ServiceError: `INVALID_ARGUMENT` when the address cannot be used.
    """
    server = grpc.aio.server(interceptors=[CallInterceptor()], options=_options(engine.limits))
    model_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(engine), server)
    server_pb2_grpc.add_ServerServiceServicer_to_server(ServerService(engine), server)
    server.add_generic_rpc_handlers((ExtractionService(engine).handler(), StreamService(engine).handler()))
    health_service = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    for name in ("", *_SERVICES):
        await health_service.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
    if with_reflection:
        reflection.enable_server_reflection(
            [*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME], server
        )
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT, f"cannot listen on {host}:{port}; is another server running there?"
        ) from None
    await server.start()
    return RpcServer(bound, server, health_service)


def _options(limits: Limits) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", limits.max_chunk_bytes + _MESSAGE_ROOM_BYTES),
        ("grpc.so_reuseport", 0),
        # Clients of long streams ask every 20 s whether we are still there; by default that is too often.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]
