"""`ServerService`: version and limits."""

from typing import Any

import torch

from trocar_api.v1 import server_pb2 as pb
from trocar_api.v1 import server_pb2_grpc
from trocar_server import __version__
from trocar_server.engine.engine import Engine


class ServerService(server_pb2_grpc.ServerServiceServicer):
    """Answers for the server itself."""

    def __init__(self, engine: Engine, shared_memory_bytes: int = 0) -> None:
        self._engine = engine
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
        )
