"""The gRPC server around the services: health, reflection, request ids, addresses."""

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RequestInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.support.models.gated_models import WAIT_S, Gate, Gated
from tests.support.servers.running_server import RunningServer
from tests.support.servers.serving import Serve, custom
from tests.support.wire.wire import raw_channel, unary_call
from trocar_api.reasons import ErrorReason
from trocar_api.v1 import model_pb2, model_pb2_grpc
from trocar_server.app import app
from trocar_server.config import ModelConfig, ServerConfig
from trocar_server.errors import ServiceError

SERVICES = ["", *(f"trocar_api.v1.{name}Service" for name in ("Model", "Extraction", "Server", "EditStore"))]
SERVICES.append("inference.GRPCInferenceService")


@pytest.fixture
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with raw_channel(server.address) as opened:
        yield opened


@pytest.mark.parametrize("service", SERVICES)
def test_a_server_that_is_ready_says_so(channel: grpc.Channel, service: str) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    reply = stub.Check(health_pb2.HealthCheckRequest(service=service))
    assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_server_that_still_loads_says_that_it_is_not_ready(gate: Gate) -> None:
    """Its example pass is held up while health is asked."""
    gate.hold()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    models = {"gated": ModelConfig(**custom(_NeedsData))}
    starting = asyncio.ensure_future(app.start(ServerConfig(port=port, device="cpu", models=models)))
    assert await asyncio.to_thread(gate.entered.wait, WAIT_S)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        check = stub.Check
        reply = await check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
        gate.release()
        running = await starting
        reply = await check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    await running.stop()


class _NeedsData(Gated):
    """Is held up while it is recorded."""

    def forward(self, x: Any) -> Any:
        x.sum().item()
        return super().forward(x)


@pytest.mark.parametrize("is_on", [True, False])
def test_reflection_is_there_only_when_asked_for(serve: Serve, is_on: bool) -> None:
    with raw_channel(serve(reflection=is_on).address) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        if is_on:
            names = {service.name for service in next(call).list_services_response.service}
            assert set(SERVICES[1:]) <= names
        else:
            with pytest.raises(grpc.RpcError):
                next(call)


@pytest.mark.parametrize(
    ("sent", "expected"),
    [("abc-123", "abc-123"), ("x" * 200, "x" * 64), ("", None), (None, None)],
)
def test_an_error_carries_the_callers_request_id_or_a_new_one(
    channel: grpc.Channel, sent: str | None, expected: str | None
) -> None:
    stub = model_pb2_grpc.ModelServiceStub(channel)
    metadata = () if sent is None else (("x-request-id", sent),)
    with pytest.raises(grpc.RpcError) as caught:
        stub.GetModel(model_pb2.GetModelRequest(model_id="x"), metadata=metadata)
    trailing: Any = caught.value.trailing_metadata()
    details = dict(trailing)["grpc-status-details-bin"]
    info = RequestInfo()
    assert any(detail.Unpack(info) for detail in Status.FromString(details).details)
    assert info.request_id == expected if expected else len(info.request_id) == 32


def test_an_unknown_method_is_unimplemented(channel: grpc.Channel) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        unary_call(channel, "ModelService/DropTables", b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_an_address_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServiceError, match=f"127.0.0.1:{port}") as caught:
            await app.start(ServerConfig(port=port, device="cpu"))
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
