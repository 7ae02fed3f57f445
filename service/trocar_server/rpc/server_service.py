"""`ServerService`: version and limits."""

from typing import Any

import torch

from trocar_api.v1 import server_pb2 as pb
from trocar_api.v1 import server_pb2_grpc
from trocar_server import __version__
from trocar_server.engine.engine import Engine


class ServerService(server_pb2_grpc.ServerServiceServicer):
    """Answers for the server itself."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        """Return version, device and limits."""
        return pb.GetServerInfoResponse(
            version=__version__,
            torch_version=torch.__version__,
            device=str(self._engine.owner.device),
            limits=pb.ServerLimits(**self._engine.limits.model_dump()),
        )
