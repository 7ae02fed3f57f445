"""Starting and stopping as a whole: what fails leaves nothing running."""

import asyncio
import socket
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import trocar
from tests.support.models.odd_models import Identity, TellsPaths
from tests.support.servers.serving import custom
from trocar_api.reasons import ErrorReason
from trocar_server.app import app
from trocar_server.app.access import check_address
from trocar_server.app.specs import model_spec
from trocar_server.config import ModelConfig, ServerConfig
from trocar_server.errors import ServiceError


def owner_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("torch-")}


async def refused(**settings: object) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        await app.start(ServerConfig(port=0, device="cpu", **settings))  # type: ignore[arg-type]
    return caught.value


async def test_a_stopped_server_leaves_no_thread() -> None:
    before = owner_threads()
    running = await app.start(
        ServerConfig(port=0, device="cpu", models={"m": ModelConfig(**custom(Identity))})
    )
    assert len(owner_threads() - before) == 1
    await running.stop()
    assert owner_threads() == before


async def test_a_model_that_cannot_be_loaded_leaves_no_thread() -> None:
    before = owner_threads()
    models = {"m": ModelConfig(**custom(TellsPaths, (7,)))}
    assert (await refused(models=models)).reason is ErrorReason.MODEL_INVALID
    assert owner_threads() == before


async def test_a_model_that_nobody_knows_leaves_no_thread() -> None:
    before = owner_threads()
    models = {"m": ModelConfig(architecture="resnet9000")}
    assert (await refused(models=models)).reason is ErrorReason.UNKNOWN_ARCHITECTURE
    assert owner_threads() == before


async def test_an_announcement_that_fails_leaves_no_thread(tmp_path: Path) -> None:
    def announce(running: app.App) -> None:
        raise FileNotFoundError("no such folder")

    before = owner_threads()
    with pytest.raises(FileNotFoundError):
        await app.serve(ServerConfig(port=0, device="cpu", data_dir=tmp_path), announce)
    assert owner_threads() == before


def can_bind_ipv6_loopback() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.skipif(not can_bind_ipv6_loopback(), reason="needs IPv6 on loopback")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
async def test_loopback_of_ipv6_is_an_address(host: str) -> None:
    models = {"m": ModelConfig(**custom(Identity))}
    running = await app.start(ServerConfig(host=host, port=0, device="cpu", models=models, health_port=0))
    try:
        assert running.rpc.address == f"[::1]:{running.rpc.port}"
        async with trocar.aio.connect(running.rpc.address) as client:
            assert [model.model_id for model in await client.models()] == ["m"]
        reader, writer = await asyncio.open_connection("::1", running.rpc.health_port)
        writer.close()
        reader.feed_eof()
    finally:
        await running.stop()


async def test_an_address_that_is_taken_leaves_no_thread() -> None:
    before = owner_threads()
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ServiceError):
        await app.start(ServerConfig(port=taken.getsockname()[1], device="cpu"))
    assert owner_threads() == before


def unix(path: Path, **settings: Any) -> ServerConfig:
    return ServerConfig(host=f"unix:{path}", device="cpu", grace_s=1.0, **settings)


@pytest.fixture
def open_folder(tmp_path: Path) -> Path:
    """A folder that everybody can enter."""
    tmp_path.chmod(0o755)
    return tmp_path


async def test_a_unix_socket_is_an_address_of_this_user_alone(open_folder: Path) -> None:
    path = open_folder / "odd name%41.sock"
    running = await app.start(unix(path, models={"m": ModelConfig(**custom(Identity))}))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    async with trocar.aio.connect(running.rpc.address) as client:
        assert [model.model_id for model in await client.models()] == ["m"]
    await running.stop()
    assert not path.exists()


async def test_a_socket_that_a_killed_server_left_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
    running = await app.start(unix(path))
    async with trocar.aio.connect(f"unix:{path}") as client:
        assert await client.models() == []
    await running.stop()


async def test_a_socket_in_use_is_left_to_its_server(tmp_path: Path) -> None:
    first = await app.start(unix(tmp_path / "s"))
    before = owner_threads()
    with pytest.raises(ServiceError, match="another server is listening"):
        await app.start(unix(tmp_path / "s"))
    assert owner_threads() == before
    async with trocar.aio.connect(first.rpc.address) as client:
        assert await client.models() == []
    await first.stop()


async def test_a_socket_in_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="does its folder exist") as caught:
        await app.start(unix(tmp_path / "nowhere" / "s"))
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT


def test_categories_may_be_given_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "names.txt"
    path.write_text("Katze\nBär\n", encoding="utf-8")
    assert model_spec("m", ModelConfig(factory="a:b", categories=str(path))).categories == ("Katze", "Bär")


def test_categories_may_be_those_of_a_torchvision_model() -> None:
    categories = model_spec("m", ModelConfig(factory="a:b", categories="torchvision:resnet18")).categories
    assert categories is not None
    assert len(categories) == 1000


def test_a_file_of_categories_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match=r"names\.txt"):
        model_spec("m", ModelConfig(factory="a:b", categories=str(tmp_path / "names.txt")))


def test_an_entry_without_architecture_is_the_torchvision_model_of_its_id() -> None:
    assert model_spec("resnet18", ModelConfig()).architecture == "resnet18"


@pytest.mark.parametrize("model_id", ["UPPER", "a b", "../x", "", "-x", "x" * 64])
def test_an_id_that_could_be_something_else_is_refused(model_id: str) -> None:
    with pytest.raises(ServiceError):
        model_spec(model_id, ModelConfig(architecture="resnet18"))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org", ""])
async def test_an_address_that_is_open_to_others_is_refused(host: str) -> None:
    with pytest.raises(ServiceError, match="--insecure") as caught:
        await app.start(ServerConfig(host=host, port=0))
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT


TLS: dict[str, Any] = {"tls_cert": "server.pem", "tls_key": "server-key.pem"}
INSUFFICIENT = [
    {"tokens": True},
    {"tls_client_ca": "ca.pem"},
    TLS,
    {"tokens": True, "tls_cert": "server.pem"},
    {"tokens": True, "tls_key": "server-key.pem"},
]


@pytest.mark.parametrize("settings", INSUFFICIENT)
def test_an_open_address_needs_both_tls_and_proof_of_who_calls(settings: dict[str, Any]) -> None:
    with pytest.raises(ServiceError, match="--insecure") as caught:
        check_address(ServerConfig(host="0.0.0.0", **settings))
    assert "tls_cert" in caught.value.message


@pytest.mark.parametrize("proof", [{"tokens": True}, {"tls_client_ca": "ca.pem"}])
def test_an_open_address_is_taken_with_both(proof: dict[str, Any]) -> None:
    check_address(ServerConfig(host="0.0.0.0", **{**TLS, **proof}))


@pytest.mark.parametrize(
    "settings", [{"tls_cert": "server.pem"}, {"tls_key": "key.pem"}, {"tls_client_ca": "ca.pem"}, TLS]
)
async def test_tls_with_files_that_are_not_there_leaves_no_thread(settings: dict[str, str]) -> None:
    before = owner_threads()
    assert "tls_cert" in (await refused(**settings)).message
    assert owner_threads() == before


async def test_a_damaged_file_of_tokens_leaves_no_thread(tmp_path: Path) -> None:
    before = owner_threads()
    (tmp_path / "tokens.json").touch(0o600)
    error = await refused(tokens=True, data_dir=tmp_path)
    assert error.reason is ErrorReason.STORAGE_UNAVAILABLE
    assert owner_threads() == before


async def test_insecure_is_warned_of_at_the_start(tmp_path: Path) -> None:
    with capture_logs() as lines:
        running = await app.start(ServerConfig(port=0, insecure=True, data_dir=tmp_path, device="cpu"))
        await running.stop()
    (line,) = [line for line in lines if line["event"] == "insecure"]
    assert line["log_level"] == "warning"
    assert "127.0.0.1" in line["problem"]


def test_an_open_address_is_taken_when_the_operator_insists() -> None:
    check_address(ServerConfig(host="0.0.0.0", insecure=True))
