"""A port that answers health checks and nothing else."""

import socket
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import model_pb2, model_pb2_grpc
from trocar_server.errors import ServiceError
from trocar_server.rpc.listen.health_port import start_health_port
from trocar_server.rpc.listen.health_service import HealthService

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def ask(port: int, name: str = "") -> int:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        return int(reply.status)


@pytest.mark.parametrize("status", [SERVING, NOT_SERVING])
async def test_it_says_what_the_service_says(status: int) -> None:
    service = HealthService()
    await service.set("some.Service", status)
    server, port = await start_health_port(service, "127.0.0.1", 0)
    assert await ask(port, "some.Service") == status
    await server.stop(None)


async def test_it_knows_no_other_method() -> None:
    server, port = await start_health_port(HealthService(), "127.0.0.1", 0)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await model_pb2_grpc.ModelServiceStub(channel).ListModels(model_pb2.ListModelsRequest())
    await server.stop(None)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_large_message_is_refused() -> None:
    server, port = await start_health_port(HealthService(), "127.0.0.1", 0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(port, "x" * 4096)
    await server.stop(None)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_port_that_is_taken_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ServiceError) as caught:
        await start_health_port(HealthService(), "127.0.0.1", taken.getsockname()[1])
    assert "health_port" in caught.value.message
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT


async def test_beside_a_unix_socket_it_is_of_loopback() -> None:
    service = HealthService()
    await service.set("", SERVING)
    server, port = await start_health_port(service, "unix:/run/trocar.sock", 0)
    found = await ask(port)
    await server.stop(None)
    assert found == SERVING
