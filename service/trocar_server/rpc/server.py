"""The gRPC server: services, options, health, start and stop."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import (
    dataset_pb2,
    dataset_pb2_grpc,
    edit_store_pb2,
    edit_store_pb2_grpc,
    extraction_pb2,
    fit_pb2,
    fit_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    server_pb2,
    server_pb2_grpc,
    stream_pb2,
    trainer_pb2,
    trainer_pb2_grpc,
)
from trocar_server.config import Limits
from trocar_server.edit_store import EditStore
from trocar_server.engine.engine import Engine
from trocar_server.errors import ServiceError
from trocar_server.rpc.dataset_service import DatasetService
from trocar_server.rpc.doors import Doors
from trocar_server.rpc.edit_store_service import EditStoreService
from trocar_server.rpc.extraction_service import ExtractionService
from trocar_server.rpc.fit_service import FitService
from trocar_server.rpc.gates import Gate, OpenGate
from trocar_server.rpc.interceptor import CallInterceptor
from trocar_server.rpc.model_service import ModelService
from trocar_server.rpc.operator import Operator
from trocar_server.rpc.running_calls import RunningCalls
from trocar_server.rpc.server_service import ServerService
from trocar_server.rpc.stored_lists import StoredLists
from trocar_server.rpc.stream_service import StreamService
from trocar_server.rpc.trainer_service import TrainerService
from trocar_server.rpc.unix_socket import check_free, owner_only, socket_path, target_of
from trocar_server.training.datasets import DatasetLibrary
from trocar_server.training.fitting import Fits
from trocar_server.training.trainers import Trainers

# Inputs of up to 4 MiB come within one message; more room than that is for descriptions.
_MESSAGE_ROOM_BYTES = 8 << 20

_SERVICES = [
    file.services_by_name[name].full_name
    for file, name in (
        (extraction_pb2.DESCRIPTOR, "ExtractionService"),
        (stream_pb2.DESCRIPTOR, "StreamService"),
        (model_pb2.DESCRIPTOR, "ModelService"),
        (server_pb2.DESCRIPTOR, "ServerService"),
        (edit_store_pb2.DESCRIPTOR, "EditStoreService"),
        (trainer_pb2.DESCRIPTOR, "TrainerService"),
        (fit_pb2.DESCRIPTOR, "FitService"),
        (dataset_pb2.DESCRIPTOR, "DatasetService"),
    )
]


@dataclass(frozen=True)
class Parts:
    """What the services speak for."""

    engine: Engine
    edit_store: EditStore
    datasets: DatasetLibrary
    trainers: Trainers
    fits: Fits
    operator: Operator
    doors: Doors


@dataclass
class RpcServer:
    """A running gRPC server.

    Attributes:
        address: Where clients connect, `host:port` or `unix:/path`.
        port: The TCP port that it listens on; 0 for a Unix socket.
        running: The calls that are under way.
    """

    address: str
    port: int
    running: RunningCalls
    _server: grpc.aio.Server
    _health: health.aio.HealthServicer

    async def set_serving(self, is_serving: bool = True) -> None:
        """Tell health checks whether every service is ready."""
        status = health_pb2.HealthCheckResponse
        for name in ("", *_SERVICES):
            await self._health.set(name, status.SERVING if is_serving else status.NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, let calls finish for `grace_s` seconds, then end."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


async def start_server(
    parts: Parts,
    host: str,
    port: int,
    *,
    with_reflection: bool = False,
    log: Any = None,
    gate: Gate | None = None,
    credentials: grpc.ServerCredentials | None = None,
) -> RpcServer:
    """Start listening; health says NOT_SERVING until `set_serving`.

    Args:
        parts: What answers.
        host: Address to listen on, or `unix:/path`.
        port: TCP port, 0 for a free one; without meaning for a Unix socket.
        with_reflection: Whether to offer gRPC server reflection.
        log: structlog's logger `trocar` when None.
        gate: Who may do what; everybody everything when None.
        credentials: For TLS; plain text when None.

    Raises:
        ServiceError: `INVALID_ARGUMENT` when the address cannot be used.
    """
    engine, gate = parts.engine, gate or OpenGate()
    running = RunningCalls(gate)
    interceptor = CallInterceptor(log, gate, parts.doors, running)
    server = grpc.aio.server(interceptors=[interceptor], options=_options(engine.limits))
    model_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(engine), server)
    server_pb2_grpc.add_ServerServiceServicer_to_server(ServerService(engine, parts.operator), server)
    edits = EditStoreService(engine, parts.edit_store)
    edit_store_pb2_grpc.add_EditStoreServiceServicer_to_server(edits, server)
    dataset_pb2_grpc.add_DatasetServiceServicer_to_server(DatasetService(parts.datasets), server)
    lists = StoredLists(engine, parts.edit_store)
    tuning = TrainerService(parts.trainers)
    server.add_generic_rpc_handlers(
        (ExtractionService(engine, lists).handler(), StreamService(engine, lists).handler(), tuning.handler())
    )
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(tuning, server)
    fit_pb2_grpc.add_FitServiceServicer_to_server(FitService(parts.fits), server)
    health_service = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    for name in ("", *_SERVICES):
        await health_service.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
    if with_reflection:
        reflection.enable_server_reflection(
            [*_SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME], server
        )
    address, bound = _listen(server, host, port, credentials)
    await server.start()
    return RpcServer(address, bound, running, server, health_service)


def _listen(
    server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None
) -> tuple[str, int]:
    """Bind the server; return where clients connect, and the TCP port or 0."""
    path = socket_path(host)
    if path is not None:
        check_free(path)
    address = f"{host}:{port}" if path is None else target_of(path)
    try:
        with nullcontext() if path is None else owner_only(path):
            if credentials is None:
                bound = server.add_insecure_port(address)
            else:
                bound = server.add_secure_port(address, credentials)
    except (RuntimeError, OSError):
        hint = (
            "is another server running there?" if path is None else "does its folder exist, and is it yours?"
        )
        raise ServiceError(ErrorReason.INVALID_ARGUMENT, f"cannot listen on {address}; {hint}") from None
    return (f"{host}:{bound}", bound) if path is None else (address, 0)


def _options(limits: Limits) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", limits.max_chunk_bytes + _MESSAGE_ROOM_BYTES),
        ("grpc.so_reuseport", 0),
        # Clients of long streams ask every 20 s whether we are still there; by default that is too often.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ]
