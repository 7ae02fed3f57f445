"""`grpc.health.v1.Health`: the serving state of each service, open to every caller.

Replaces `grpc_health`'s own servicer (1.81): there, when one caller of `Watch` leaves, other watchers of the
same service get no more updates; later versions log a traceback for each call of `List`.
"""

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from trocar_server.rpc.transfer.messages import CallContext

_SERVICE = "grpc.health.v1.Health"
_Status = health_pb2.HealthCheckResponse


class HealthService:
    """The state of each service, pushed to its watchers at once. Belongs to one event loop."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {"": _Status.SERVING}
        self._changed = asyncio.Event()
        self._is_stopping = False

    def status(self, name: str = "") -> int | None:
        """State of a service, or None."""
        return self._statuses.get(name)

    async def set(self, name: str, status: int) -> None:
        """Set the state of a service; no effect once the server stops."""
        if not self._is_stopping:
            self._set(name, status)

    async def enter_graceful_shutdown(self) -> None:
        """Set every service to NOT_SERVING, permanently."""
        self._is_stopping = True
        for name in self._statuses:
            self._set(name, _Status.NOT_SERVING)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: CallContext
    ) -> health_pb2.HealthCheckResponse:
        """Return the state of a service."""
        status = self.status(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return _Status(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: CallContext) -> None:
        """Send the state of a service now, and on each change."""
        sent = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, _Status.SERVICE_UNKNOWN)
            if status != sent:
                await context.write(_Status(status=status))
                sent = status
            await changed.wait()

    def handler(self) -> grpc.GenericRpcHandler:
        """Handler of `Check` and `Watch`; other methods do not exist."""
        codec: dict[str, Any] = {
            "request_deserializer": health_pb2.HealthCheckRequest.FromString,
            "response_serializer": _Status.SerializeToString,
        }
        return grpc.method_handlers_generic_handler(
            _SERVICE,
            {
                "Check": grpc.unary_unary_rpc_method_handler(self.Check, **codec),
                "Watch": grpc.unary_stream_rpc_method_handler(self.Watch, **codec),
            },
        )

    def _set(self, name: str, status: int) -> None:
        self._statuses[name] = status
        self._changed.set()
        self._changed = asyncio.Event()
