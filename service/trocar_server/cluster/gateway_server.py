"""Gateway server: the gateway of a node as a child process; its parent sends the routing table.

It imports neither torch nor Ray: 0.3 s until it is ready, and 60 MB.
"""

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from trocar_api.reasons import ErrorReason
from trocar_server.app.access import credentials_of
from trocar_server.app.log_format import set_up_logging
from trocar_server.cluster.gateway import Gateway
from trocar_server.cluster.lines import ParentLines
from trocar_server.cluster.replica_metrics import replica_metrics
from trocar_server.cluster.routing import ReplicaTable
from trocar_server.config import ServerConfig
from trocar_server.errors import ServiceError
from trocar_server.metrics_server import MetricsServer
from trocar_server.rpc.descriptors import service_names
from trocar_server.rpc.listen.binding import why_not_bound
from trocar_server.rpc.listen.channel_arguments import server_options
from trocar_server.rpc.listen.health_service import HealthService
from trocar_server.rpc.listen.unix_socket import host_port

_LOOK_EVERY_S = 0.05
_Status = health_pb2.HealthCheckResponse


def main() -> None:
    """Read the settings, forward calls until the input ends."""
    lines = ParentLines()
    settings = lines.read()
    if settings is None:
        return
    config = ServerConfig(**settings["config"])
    set_up_logging(config.log_format)
    try:
        asyncio.run(serve(config, lines, settings["taken"], settings["key"]))
    except ServiceError as error:
        lines.write(problem=error.message)
        raise SystemExit(1) from None


async def serve(config: ServerConfig, lines: ParentLines, taken: list[str], key: str) -> None:
    """Forward calls until the input ends, then let running ones end.

    Args:
        config: Address, TLS and limits, as of a server.
        lines: Brings the routing table.
        taken: Addresses of other gateways on this machine, as with simulated nodes.
        key: The cluster's key.

    Raises:
        ServiceError: The address or a file of TLS cannot be used.
    """
    table, health = ReplicaTable(), HealthService()
    gateway = Gateway(table, config.cluster.hold_s, config.limits.stall_timeout_s, config.cluster.direct, key)
    server = grpc.aio.server(options=server_options(config.limits, config.max_message_bytes))
    server.add_generic_rpc_handlers((health.handler(), gateway.handler()))
    address = _listen(server, config, taken)
    metrics = _metrics(config, table, is_first=not taken)
    await server.start()
    lines.write(ready=address)
    try:
        while (line := await asyncio.to_thread(lines.read)) is not None:
            gateway.update(line["replicas"], line["wanted"])
            await _set_health(health, is_serving=bool(table.serving()))
    finally:
        await health.enter_graceful_shutdown()
        await _stop(server, gateway, config)
        if metrics is not None:
            metrics.stop()


async def _stop(server: Any, gateway: Gateway, config: ServerConfig) -> None:
    """Refuse new calls; wait for work for `drain_s`, and for calls without work for the grace period."""
    drain_s, grace_s = config.cluster.drain_s, config.grace_s
    refusing = asyncio.create_task(server.stop(drain_s + grace_s))
    try:
        async with asyncio.timeout(drain_s):
            while gateway.work_count:  # noqa: ASYNC110 - it counts calls, it tells nobody
                await asyncio.sleep(_LOOK_EVERY_S)
    except TimeoutError:
        pass
    await server.stop(grace_s)
    await refusing


def _metrics(config: ServerConfig, table: ReplicaTable, *, is_first: bool) -> MetricsServer | None:
    """Serve the metrics of all replicas, if configured; only the first gateway of a machine has the port."""
    if config.metrics_port is None:
        return None
    port = config.metrics_port if is_first else 0
    return MetricsServer(replica_metrics(table.metrics_addresses), config.metrics_host, port)


async def _set_health(health: HealthService, *, is_serving: bool) -> None:
    status = _Status.SERVING if is_serving else _Status.NOT_SERVING
    for name in ("", *service_names()):
        await health.set(name, status)


def _listen(server: Any, config: ServerConfig, taken: list[str]) -> str:
    """Bind the server, to a free port if another gateway has the right one; returns `host:port`."""
    credentials = credentials_of(config)
    port = 0 if host_port(config.host, config.port) in taken else config.port
    address = host_port(config.host, port)
    try:
        if credentials is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, credentials)
    except RuntimeError:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT, f"cannot listen on {address}; {why_not_bound(config.host, port)}"
        ) from None
    return host_port(config.host, bound)


if __name__ == "__main__":
    main()
