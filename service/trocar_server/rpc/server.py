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
    shared_memory_pb2,
    stream_pb2,
    trainer_pb2,
    trainer_pb2_grpc,
)
from trocar_server.config import Limits
from trocar_server.edit_store import EditStore
from trocar_server.engine.engine import Engine
from trocar_server.errors import ServiceError
from trocar_server.rpc.compression import OPTIONS
from trocar_server.rpc.dataset_service import DatasetService
from trocar_server.rpc.doors import Doors
from trocar_server.rpc.edit_store_service import EditStoreService
from trocar_server.rpc.extraction_service import ExtractionService
from trocar_server.rpc.fit_service import FitService
from trocar_server.rpc.gates import Gate, OpenGate
from trocar_server.rpc.health_port import LIVE, start_health_port
from trocar_server.rpc.interceptor import CallInterceptor
from trocar_server.rpc.model_service import ModelService
from trocar_server.rpc.oip.reflection import pool_of
from trocar_server.rpc.oip.service import NAME as OPEN_INFERENCE
from trocar_server.rpc.oip.service import OpenInferenceService
from trocar_server.rpc.operator import Operator
from trocar_server.rpc.running_calls import RunningCalls
from trocar_server.rpc.server_service import ServerService
from trocar_server.rpc.shared_memory_service import SharedMemoryService
from trocar_server.rpc.stored_lists import StoredLists
from trocar_server.rpc.stream_service import StreamService
from trocar_server.rpc.trainer_service import TrainerService
from trocar_server.rpc.unix_socket import check_free, owner_only, socket_path, target_of
from trocar_server.shared_memory import open_lender
from trocar_server.telemetry import NOBODY, CallObserver
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
        (shared_memory_pb2.DESCRIPTOR, "SharedMemoryService"),
        (model_pb2.DESCRIPTOR, "ModelService"),
        (server_pb2.DESCRIPTOR, "ServerService"),
        (edit_store_pb2.DESCRIPTOR, "EditStoreService"),
        (trainer_pb2.DESCRIPTOR, "TrainerService"),
        (fit_pb2.DESCRIPTOR, "FitService"),
        (dataset_pb2.DESCRIPTOR, "DatasetService"),
    )
]
_SPOKEN = [*_SERVICES, OPEN_INFERENCE]
"""Ours, and those of others that we speak."""


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
        health_port: The TCP port for health checks alone; 0 where there is none.
    """

    address: str
    port: int
    running: RunningCalls
    _server: grpc.aio.Server
    _health: health.aio.HealthServicer
    _sharing: SharedMemoryService
    health_port: int = 0
    _health_server: grpc.aio.Server | None = None

    async def set_serving(self, is_serving: bool = True) -> None:
        """Tell health checks whether every service is ready."""
        status = health_pb2.HealthCheckResponse
        for name in ("", *_SPOKEN):
            await self._health.set(name, status.SERVING if is_serving else status.NOT_SERVING)

    async def open_health_port(self, host: str, port: int) -> None:
        """Answer health checks at a port of their own as well; see `start_health_port`."""
        self._health_server, self.health_port = await start_health_port(self._health, host, port)

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, let calls finish for `grace_s` seconds, then end."""
        await self._health.enter_graceful_shutdown()
        self._sharing.stop()
        await self._server.stop(grace_s)
        if self._health_server is not None:
            await self._health_server.stop(None)


async def start_server(  # noqa: PLR0913 - one for each thing that an operator sets
    parts: Parts,
    host: str,
    port: int,
    *,
    with_reflection: bool = False,
    log: Any = None,
    gate: Gate | None = None,
    credentials: grpc.ServerCredentials | None = None,
    max_message_bytes: int = 0,
    observer: CallObserver = NOBODY,
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
        max_message_bytes: Of one message that comes in; never less than a chunk with its description needs.
        observer: Is told of every call.

    Raises:
        ServiceError: `INVALID_ARGUMENT` when the address cannot be used.
    """
    engine, gate = parts.engine, gate or OpenGate()
    calls = RunningCalls(gate)
    server = grpc.aio.server(
        interceptors=[CallInterceptor(log, gate, observer, parts.doors, calls)],
        options=_options(engine.limits, max_message_bytes),
    )
    model_pb2_grpc.add_ModelServiceServicer_to_server(ModelService(engine), server)
    lender = None if socket_path(host) is None else open_lender(engine.limits.max_shared_memory_bytes)
    info = ServerService(engine, parts.operator, 0 if lender is None else lender.limit_bytes)
    server_pb2_grpc.add_ServerServiceServicer_to_server(info, server)
    edits = EditStoreService(engine, parts.edit_store)
    edit_store_pb2_grpc.add_EditStoreServiceServicer_to_server(edits, server)
    dataset_pb2_grpc.add_DatasetServiceServicer_to_server(
        DatasetService(parts.datasets, engine.admission), server
    )
    lists = StoredLists(engine, parts.edit_store)
    tuning, sharing = TrainerService(parts.trainers), SharedMemoryService(lender)
    server.add_generic_rpc_handlers(
        (
            ExtractionService(engine, lists, lender).handler(),
            StreamService(engine, lists).handler(),
            sharing.handler(),
            tuning.handler(),
        )
    )
    trainer_pb2_grpc.add_TrainerServiceServicer_to_server(tuning, server)
    fit_pb2_grpc.add_FitServiceServicer_to_server(FitService(parts.fits), server)
    health_service = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    server.add_generic_rpc_handlers((OpenInferenceService(engine, health_service).handler(),))
    for name in ("", *_SPOKEN):
        await health_service.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
    await health_service.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
    if with_reflection:
        others = [health.SERVICE_NAME, reflection.SERVICE_NAME]
        pool = pool_of([*_SERVICES, *others])
        reflection.enable_server_reflection([*_SPOKEN, *others], server, pool)
    address, bound = _listen(server, host, port, credentials)
    await server.start()
    return RpcServer(address, bound, calls, server, health_service, sharing)


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


def _options(limits: Limits, max_message_bytes: int) -> list[tuple[str, int]]:
    return [
        (
            "grpc.max_receive_message_length",
            max(max_message_bytes, limits.max_chunk_bytes + _MESSAGE_ROOM_BYTES),
        ),
        ("grpc.so_reuseport", 0),
        # Clients of long streams ask every 20 s whether we are still there; by default that is too often.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        *OPTIONS,
    ]
