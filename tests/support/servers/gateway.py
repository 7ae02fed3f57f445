"""A gateway process of a cluster without Ray: a test says which servers are its replicas."""

from collections.abc import Sequence
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.servers.replica_report import replica_report
from tests.support.servers.running_server import RunningServer
from tests.support.wire.wire import raw_channel
from trocar_server.cluster.child_process import ChildProcess

MODELS = ("plain", "gated")
KEY = "key of the tests"


def replica_id(server: RunningServer, model_id: str) -> str:
    """Return the id of a server as the replica of a model."""
    return f"{server.address} {model_id}"


def metrics_of(server: RunningServer) -> str:
    """Return the address of a server's metrics; empty if they are off."""
    port = server.app.telemetry.metrics_port
    return f"127.0.0.1:{port}" if port else ""


class Gateway:
    """A gateway process, and the routing table that a test gives it."""

    def __init__(
        self,
        *servers: RunningServer,
        hold_s: float = 60.0,
        drain_s: float = 300.0,
        direct: bool = True,
        models: Sequence[str] = MODELS,
        **settings: Any,
    ) -> None:
        self._models = models
        cluster = {"hold_s": hold_s, "drain_s": drain_s, "direct": direct}
        config = {"port": 0, "cluster": cluster, **settings}
        lines = {"config": config, "taken": [], "key": KEY}
        self._child = ChildProcess("trocar_server.cluster.gateway_server", lines, lambda line: None)
        self.address = self._child.wait_ready()
        self.serve(*servers)

    def serve(self, *servers: RunningServer, wanted: int = 1, client_address: str = "") -> None:
        """Give it the servers as replicas; to clients it names their addresses, or another one."""
        reports = [
            replica_report(
                replica_id(server, model_id),
                model_id,
                server.app.rpc.plain_address or server.address,
                client_address=client_address or server.address,
                metrics_address=metrics_of(server),
                slot=str(slot),
            )
            for slot, server in enumerate(servers)
            for model_id in self._models
        ]
        self._child.send({"replicas": reports, "wanted": dict.fromkeys(self._models, wanted)})

    def stop(self) -> None:
        """Stop the process."""
        self._child.stop(20.0)


def is_serving(gateway: Gateway) -> bool:
    """Whether a gateway reports SERVING."""
    with raw_channel(gateway.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        reply = stub.Check(health_pb2.HealthCheckRequest())
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
