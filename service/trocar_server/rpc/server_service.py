"""`ServerService`: version and limits."""

from typing import Any

import torch

from trocar_api.v1 import server_pb2 as pb
from trocar_api.v1 import server_pb2_grpc
from trocar_server import __version__
from trocar_server.engine.engine import Engine
from trocar_server.rpc.fields import invalid
from trocar_server.rpc.operator import Operator

_WANTED = {
    pb.DRAIN_ACTION_UNSPECIFIED: None,
    pb.DRAIN_ACTION_START: True,
    pb.DRAIN_ACTION_UNDO: False,
}


class ServerService(server_pb2_grpc.ServerServiceServicer):
    """Answers for the server itself."""

    def __init__(self, engine: Engine, operator: Operator, shared_memory_bytes: int = 0) -> None:
        self._engine = engine
        self._operator = operator
        self._shared_memory_bytes = shared_memory_bytes

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        """Return version, device and limits."""
        limits = self._engine.limits.model_dump()
        limits["max_shared_memory_bytes"] = self._shared_memory_bytes
        return pb.GetServerInfoResponse(
            version=__version__,
            torch_version=torch.__version__,
            device=str(self._engine.owner.device),
            limits=pb.ServerLimits(**limits),
            server_id=self._operator.server_id,
            is_draining=self._operator.is_draining,
        )

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainResponse:
        """Let the server run empty, or take work again."""
        if request.action not in _WANTED:
            raise invalid("action", "it is no DrainAction")
        state = await self._operator.drain(_WANTED[request.action])
        return pb.DrainResponse(
            is_draining=state.is_draining,
            running_call_count=state.running_call_count,
            waiting_fit_count=state.waiting_fit_count,
        )

    async def ReloadConfig(self, request: pb.ReloadConfigRequest, context: Any) -> pb.ReloadConfigResponse:
        """Read the configuration again."""
        return pb.ReloadConfigResponse(changes=await self._operator.reload())
