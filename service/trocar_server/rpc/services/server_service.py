"""`ServerService`: version and limits, operation and status."""

from collections.abc import Callable
from dataclasses import asdict

from trocar_api.v1 import server_pb2 as pb
from trocar_api.v1 import server_pb2_grpc
from trocar_server import __version__
from trocar_server.caller import current_flow, is_operator
from trocar_server.engine.engine import Engine
from trocar_server.engine.request.dtypes import TORCH_VERSION
from trocar_server.engine.status import CallerStatus, EngineStatus, status_of
from trocar_server.rpc.call.principal import log_name
from trocar_server.rpc.codec.fields import invalid
from trocar_server.rpc.codec.text import sendable
from trocar_server.rpc.services.operator import Operator
from trocar_server.rpc.transfer.messages import CallContext

_TOLD = set(pb.ServerLimits.DESCRIPTOR.fields_by_name)
"""Limits reported to clients; others concern only operators."""
_MOST_CALLERS = 100
_WANTED = {
    pb.DRAIN_ACTION_UNSPECIFIED: None,
    pb.DRAIN_ACTION_START: True,
    pb.DRAIN_ACTION_UNDO: False,
}


class ServerService(server_pb2_grpc.ServerServiceServicer):
    """Servicer of server information and operation."""

    def __init__(self, engine: Engine, operator: Operator, shared_memory_bytes: int = 0) -> None:
        self._engine = engine
        self._operator = operator
        self._shared_memory_bytes = shared_memory_bytes

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, context: CallContext
    ) -> pb.GetServerInfoResponse:
        """Return version, device and limits."""
        limits = self._engine.limits.model_dump(include=_TOLD)
        limits["max_shared_memory_bytes"] = self._shared_memory_bytes
        return pb.GetServerInfoResponse(
            version=__version__,
            torch_version=TORCH_VERSION,
            device=str(self._engine.owner.device),
            limits=pb.ServerLimits(**limits),
            server_id=self._operator.server_id,
            is_draining=self._operator.is_draining,
            features=[
                pb.Feature(name=one.name, is_on=one.is_on, reason=sendable(one.problem or one.note))
                for one in self._operator.features()
            ],
        )

    async def Drain(self, request: pb.DrainRequest, context: CallContext) -> pb.DrainResponse:
        """Drain the server, or accept work again."""
        if request.action not in _WANTED:
            raise invalid("action", "it is not a DrainAction")
        state = await self._operator.drain(_WANTED[request.action])
        return pb.DrainResponse(
            is_draining=state.is_draining,
            running_call_count=state.running_call_count,
            waiting_fit_count=state.waiting_fit_count,
        )

    async def ReloadConfig(
        self, request: pb.ReloadConfigRequest, context: CallContext
    ) -> pb.ReloadConfigResponse:
        """Reload the configuration."""
        return pb.ReloadConfigResponse(changes=await self._operator.reload())

    async def GetServerStatus(
        self, request: pb.GetServerStatusRequest, context: CallContext
    ) -> pb.GetServerStatusResponse:
        """Return queues, callers and caches; to callers without the scope admin, what is theirs."""
        status = status_of(self._engine)
        if not is_operator():
            return _own_status(status, self._engine.catalogue.has)
        return pb.GetServerStatusResponse(
            queues=[pb.QueueStatus(**asdict(one)) for one in status.queues],
            callers=[_caller(one) for one in status.callers[:_MOST_CALLERS]],
            total=_caller(status.total),
            caches=[pb.CacheStatus(**asdict(one)) for one in status.caches],
            device=pb.DeviceStatus(**asdict(status.device)),
        )


def _own_status(status: EngineStatus, is_listed: Callable[[str], bool]) -> pb.GetServerStatusResponse:
    """Return the queues of listed models, and the caller's own row."""
    flow = current_flow()
    return pb.GetServerStatusResponse(
        queues=[pb.QueueStatus(**asdict(one)) for one in status.queues if is_listed(one.model_id)],
        callers=[_caller(one) for one in status.callers if one.flow == flow],
    )


def _caller(status: CallerStatus) -> pb.CallerStatus:
    fields = asdict(status)
    return pb.CallerStatus(caller=sendable(log_name(fields.pop("flow"))), **fields)
