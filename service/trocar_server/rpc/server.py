"""The gRPC server: services, options, health, start and stop."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection

from trocar_api.gateways import REPLICA_SERVICE
from trocar_api.reasons import ErrorReason
from trocar_server.directions import DirectionStore
from trocar_server.edit_store import EditStore
from trocar_server.engine.engine import Engine
from trocar_server.errors import ServiceError
from trocar_server.rpc.call.authorization import Authorizer, OpenAuthorizer
from trocar_server.rpc.call.drain import DrainSwitch
from trocar_server.rpc.call.forwarded import GatewayAccess
from trocar_server.rpc.call.interceptor import CallInterceptor
from trocar_server.rpc.call.running_calls import RunningCalls
from trocar_server.rpc.codec.stored.named_directions import NamedDirections
from trocar_server.rpc.codec.stored.stored_lists import StoredLists
from trocar_server.rpc.descriptors import OWN, service_names
from trocar_server.rpc.listen.binding import why_not_bound
from trocar_server.rpc.listen.channel_arguments import server_options
from trocar_server.rpc.listen.health_port import LIVE, start_health_port
from trocar_server.rpc.listen.health_service import HealthService
from trocar_server.rpc.listen.registration import register
from trocar_server.rpc.listen.unix_socket import check_free, host_port, owner_only, socket_path, target_of
from trocar_server.rpc.oip.oip_messages import SERVICE as OPEN_INFERENCE
from trocar_server.rpc.oip.reflection import pool_of
from trocar_server.rpc.oip.service import OpenInferenceService
from trocar_server.rpc.services.dataset_service import DatasetService
from trocar_server.rpc.services.direction_fitting import DirectionFits
from trocar_server.rpc.services.direction_service import DirectionService
from trocar_server.rpc.services.edit_store_service import EditStoreService
from trocar_server.rpc.services.extraction_service import ExtractionService
from trocar_server.rpc.services.fit_service import FitService
from trocar_server.rpc.services.generation_service import GenerationService
from trocar_server.rpc.services.model_service import ModelService
from trocar_server.rpc.services.operator import Operator
from trocar_server.rpc.services.prepared_call_service import PreparedCallService
from trocar_server.rpc.services.server_service import ServerService
from trocar_server.rpc.services.shared_memory_service import SharedMemoryService
from trocar_server.rpc.services.stream_service import StreamService
from trocar_server.rpc.services.trainer_service import TrainerService
from trocar_server.shared_memory import Lender, open_lender
from trocar_server.telemetry import NOBODY, CallObserver
from trocar_server.training.datasets import DatasetLibrary
from trocar_server.training.fit.fitting import Fits
from trocar_server.training.trainers import Trainers

_NO_GATEWAY = GatewayAccess()


@dataclass(frozen=True)
class Parts:
    """Components behind the services."""

    engine: Engine
    edit_store: EditStore
    direction_store: DirectionStore
    data_dir: Path
    datasets: DatasetLibrary
    trainers: Trainers
    fits: Fits
    operator: Operator
    drain_switch: DrainSwitch


@dataclass
class RpcServer:
    """A running gRPC server.

    Attributes:
        address: Where clients connect, `host:port` or `unix:/path`.
        port: The TCP port that it listens on; 0 for a Unix socket.
        running: The calls that are under way.
        health_port: The TCP port for health checks alone; 0 for none.
        plain_address: Where it listens in plain text as well; empty where it does not.
        replica_id: Of a cluster, which has a service of health checks of its own; empty elsewhere.
    """

    address: str
    port: int
    running: RunningCalls
    _server: grpc.aio.Server
    _health: HealthService
    _sharing: SharedMemoryService
    _prepared: PreparedCallService
    _log: Any = None
    health_port: int = 0
    _health_server: grpc.aio.Server | None = None
    plain_address: str = ""
    replica_id: str = ""

    async def set_serving(self, is_serving: bool) -> None:
        """Set the health state of every service."""
        status = health_pb2.HealthCheckResponse
        own = (REPLICA_SERVICE + self.replica_id,) if self.replica_id else ()
        for name in ("", *service_names(), *own):
            await self._health.set(name, status.SERVING if is_serving else status.NOT_SERVING)

    async def open_health_port(self, host: str, port: int) -> None:
        """Answer health checks at a port of their own as well; see `start_health_port`."""
        self._health_server, self.health_port = await start_health_port(self._health, host, port, self._log)

    async def stop(self, grace_s: float) -> None:
        """Report NOT_SERVING, let calls finish for `grace_s` seconds, then end."""
        await self._health.enter_graceful_shutdown()
        self._sharing.stop()
        self._prepared.stop()
        await self._server.stop(grace_s)
        if self._health_server is not None:
            await self._health_server.stop(None)


async def start_server(  # noqa: PLR0913 - one per operator's setting
    parts: Parts,
    host: str,
    port: int,
    *,
    with_reflection: bool = False,
    log: Any = None,
    authorizer: Authorizer | None = None,
    credentials: grpc.ServerCredentials | None = None,
    max_message_bytes: int = 0,
    observer: CallObserver = NOBODY,
    own_socket: Path | None = None,
    gateway: GatewayAccess = _NO_GATEWAY,
) -> RpcServer:
    """Start listening; health is NOT_SERVING until `set_serving`.

    Args:
        parts: The components behind the services.
        host: Address to listen on, or `unix:/path`.
        port: TCP port, 0 for a free one; without meaning for a Unix socket.
        with_reflection: Whether to offer gRPC server reflection.
        log: structlog's logger `trocar` when None.
        authorizer: Authorizes calls; all are authorized when None.
        credentials: For TLS; plain text when None.
        max_message_bytes: Of one received message; at least the size of a chunk with its description.
        observer: Notified of every call.
        own_socket: A Unix socket to listen on as well, in plain text, for a process of this server; in a
            folder that no other user can enter.
        gateway: Access of the gateways of a cluster.

    Raises:
        ServiceError: `INVALID_ARGUMENT` when the address cannot be used.
    """
    engine, authorizer = parts.engine, authorizer or OpenAuthorizer()
    calls = RunningCalls(authorizer)
    interceptor = CallInterceptor(
        log, authorizer, observer, parts.drain_switch, calls, engine.limits, gateway.key
    )
    options = server_options(engine.limits, max_message_bytes)
    server = grpc.aio.server(interceptors=[interceptor], options=options)
    lender = None if socket_path(host) is None else open_lender(engine.limits.max_shared_memory_bytes)
    named = NamedDirections(engine, parts.direction_store)
    lists = StoredLists(engine, parts.edit_store, named)
    extraction = ExtractionService(engine, lists, lender, parts.trainers)
    sharing, health_service = SharedMemoryService(lender), HealthService()
    prepared = PreparedCallService(extraction, interceptor, lender)
    servicers = {
        "ExtractionService": extraction,
        "SharedMemoryService": sharing,
        "PreparedCallService": prepared,
    }
    _register_all(server, parts, lists, lender, health_service, servicers)
    for name in ("", *service_names()):
        await health_service.set(name, health_pb2.HealthCheckResponse.NOT_SERVING)
    await health_service.set(LIVE, health_pb2.HealthCheckResponse.SERVING)
    if with_reflection:
        others = [health.SERVICE_NAME, reflection.SERVICE_NAME]
        pool = pool_of([*(service.full_name for service in OWN.values()), *others])
        reflection.enable_server_reflection([*service_names(), *others], server, pool)
    address, bound = _listen(server, host, port, credentials)
    if own_socket is not None:
        _listen(server, target_of(own_socket), 0, None)
    plain_address = _listen(server, gateway.host, 0, None)[0] if gateway.host else ""
    await server.start()
    return RpcServer(
        address, bound, calls, server, health_service, sharing, prepared, log, plain_address=plain_address
    )


def _register_all(
    server: grpc.aio.Server,
    parts: Parts,
    lists: StoredLists,
    lender: Lender | None,
    health_service: HealthService,
    made: Mapping[str, object],
) -> None:
    """Register the services, those that were made before and the others, each with its descriptor."""
    engine = parts.engine
    fits = DirectionFits(engine, parts.direction_store, parts.datasets, parts.data_dir / "direction-fits")
    servicers = {
        **made,
        "StreamService": StreamService(engine, lists, fits, parts.trainers, parts.datasets),
        "GenerationService": GenerationService(engine, lists, parts.trainers),
        "ModelService": ModelService(engine),
        "ServerService": ServerService(engine, parts.operator, 0 if lender is None else lender.limit_bytes),
        "DirectionService": DirectionService(engine, parts.direction_store, lists.directions),
        "EditStoreService": EditStoreService(engine, parts.edit_store),
        "TrainerService": TrainerService(parts.trainers, lists.directions),
        "FitService": FitService(parts.fits, engine.limits.stall_timeout_s),
        "DatasetService": DatasetService(parts.datasets, engine.admission),
    }
    for name, descriptor in OWN.items():
        register(server, descriptor, servicers[name])
    register(server, OPEN_INFERENCE, OpenInferenceService(engine, health_service))
    server.add_generic_rpc_handlers((health_service.handler(),))


def _listen(
    server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None
) -> tuple[str, int]:
    """Bind the server; return where clients connect, and the TCP port or 0."""
    path = socket_path(host)
    if path is not None:
        check_free(path)
    address = host_port(host, port) if path is None else target_of(path)
    try:
        with nullcontext() if path is None else owner_only(path):
            if credentials is None:
                bound = server.add_insecure_port(address)
            else:
                bound = server.add_secure_port(address, credentials)
    except (RuntimeError, OSError):
        hint = why_not_bound(host, port) if path is None else "does its folder exist, and is it yours?"
        raise ServiceError(ErrorReason.INVALID_ARGUMENT, f"cannot listen on {address}; {hint}") from None
    return (host_port(host, bound), bound) if path is None else (address, 0)
