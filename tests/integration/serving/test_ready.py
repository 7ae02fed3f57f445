"""`trocar status --ready` and `is_serving` on real servers, and the port for probes that speak no TLS."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2
from structlog.testing import capture_logs

import trocar
from tests.support.models.odd_models import Identity
from tests.support.servers.certificates import OPENSSL, authority, signed
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import Serve, custom
from trocar._cli import main
from trocar_server.rpc.descriptors import service_names
from trocar_server.rpc.listen.health_port import LIVE


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with capture_logs(), running_server(health_port=0, models={"identity": custom(Identity)}) as running:
        yield running


def ready(*words: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["status", "--ready", *words])
    return int(stopped.value.code or 0)


def set_health(server: RunningServer, name: str, status: str) -> None:
    value = health_pb2.HealthCheckResponse.ServingStatus.Value(status)
    server.run(lambda: server.app.rpc._health.set(name, value))


@pytest.mark.parametrize("service", ["", LIVE, *service_names()])
def test_a_server_that_serves_is_ready(server: RunningServer, service: str) -> None:
    assert ready("--server", server.address, "--service", service) == 0


def test_a_server_that_does_not_serve_is_not(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "trocar_api.v1.ModelService"
    set_health(server, name, "NOT_SERVING")
    try:
        assert ready("--server", server.address, "--service", name) == 1
        assert "is not ready" in capsys.readouterr().err
        assert ready("--server", server.address) == 0
    finally:
        set_health(server, name, "SERVING")


def test_a_server_that_runs_empty_lives_and_is_not_ready(server: RunningServer) -> None:
    with trocar.connect(server.address) as client:
        client.drain()
        try:
            assert ready("--server", server.address) == 1
            assert ready("--server", server.address, "--service", LIVE) == 0
        finally:
            client.drain(undo=True)
    assert ready("--server", server.address) == 0


def test_an_unknown_service_is_an_error(server: RunningServer) -> None:
    assert ready("--server", server.address, "--service", "trocar_api.v1.Nothing") == 1


def test_where_nobody_listens_the_code_is_three() -> None:
    with socket.socket() as bound:  # it holds the port and does not listen
        bound.bind(("127.0.0.1", 0))
        assert ready("--server", f"127.0.0.1:{bound.getsockname()[1]}") == 3


async def test_the_asyncio_client_asks_too(server: RunningServer) -> None:
    async with trocar.aio.connect(server.address) as client:
        assert await client.is_serving()
        with pytest.raises(trocar.NotFoundError):
            await client.is_serving("nothing")


@pytest.mark.skipif(OPENSSL is None, reason="needs the openssl command to make certificates")
def test_beside_mutual_tls_the_health_port_answers_without(serve: Serve, tmp_path: Path) -> None:
    ca = authority(tmp_path)
    own = signed(ca, tmp_path, "server")
    running = serve(
        models={"identity": custom(Identity)},
        data_dir=tmp_path / "data",
        tls_cert=own.certificate,
        tls_key=own.key,
        tls_client_ca=ca.certificate,
        health_port=0,
    )
    probe = f"127.0.0.1:{running.app.rpc.health_port}"
    assert ready("--server", probe) == 0
    assert ready("--server", running.address) == 3  # plain text gets no answer there
    with trocar.connect(probe) as client, pytest.raises(trocar.errors.UnimplementedError, match="health"):
        client.models()


def test_a_stopped_server_leaves_its_health_port(tmp_path: Path) -> None:
    with capture_logs(), running_server(health_port=0, data_dir=tmp_path) as running:
        probe = f"127.0.0.1:{running.app.rpc.health_port}"
        assert ready("--server", probe) == 0
    assert ready("--server", probe) == 3
