"""Why no server was reached: one plain message for each cause, without gRPC's own text."""

import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import pytest

import trocar
from tests.support.servers.certificates import OPENSSL, authority, signed
from trocar._transport.connection_failures import connection_problem
from trocar._transport.rpc_errors import error_from_rpc

_ALL = "failed to connect to all addresses; last error: UNKNOWN: "


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            f"{_ALL}ipv4:127.0.0.1:1: Failed to connect to remote host: Connection refused",
            "nothing listens on this port; is the server running there?",
        ),
        (
            "errors resolving x.invalid:50051: [field:hostname lookup error:address lookup failed for "
            "x.invalid:50051: Domain name not found]",
            "no host of this name is found; check the name",
        ),
        ("DNS resolution failed for x:1: C-ares status is not ARES_SUCCESS qtype=A name=x", None),
        (
            f"{_ALL}unix:/run/none.sock: No such file or directory",
            "there is no socket of this name; is the server running?",
        ),
        (f"{_ALL}unix:/run/a.sock: Permission denied", "the socket belongs to another user"),
        (
            f"{_ALL}ipv4:10.255.255.1:50051: connection attempt timed out before receiving SETTINGS frame",
            "the host does not answer; check the address, the port and firewalls",
        ),
        (
            f"{_ALL}ipv4:10.0.0.1:1: Network is unreachable",
            "there is no route to this host; check the address and the network",
        ),
        ("Socket closed", "the connection broke; is the server running there?"),
        ("recvmsg:Connection reset by peer", "the connection broke; is the server running there?"),
        (
            f"{_ALL}UNAVAILABLE: ipv4:127.0.0.1:9: Failed parsing HTTP/2 (Expected SETTINGS frame as the "
            "first frame, got frame type 79)",
            "something else than gRPC answers there, perhaps a web server or the metrics; the gRPC port is "
            "another, by default 50051",
        ),
        (
            "Received http2 header with status: 415",
            "a web server answers there (status 415), perhaps the page; the gRPC port is another, by default "
            "50051",
        ),
        (
            "Received http2 header with status: 502",
            "a proxy answers there with status 502; is the server behind it running?",
        ),
        ("no healthy upstream", "is the server running there? (no healthy upstream)"),
    ],
)
def test_each_failure_has_plain_words(text: str, words: str | None) -> None:
    problem = connection_problem(text, "gpu1:50051", is_tls=False)
    assert problem == words if words is not None else "is the server running there?" in problem


class Failure(grpc.RpcError):
    """A failed call, as gRPC raises it."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        self._code, self._text = code, text

    def code(self) -> grpc.StatusCode:
        return self._code

    def details(self) -> str:
        return self._text

    def trailing_metadata(self) -> tuple[Any, ...]:
        return ()


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Connection refused", trocar.errors.ServerUnavailableError),
        (
            grpc.StatusCode.INTERNAL,
            "Received http2 header with status: 415",
            trocar.errors.ServerUnavailableError,
        ),
        (
            grpc.StatusCode.UNIMPLEMENTED,
            "Received http2 header with status: 404",
            trocar.errors.ServerUnavailableError,
        ),
        (
            grpc.StatusCode.PERMISSION_DENIED,
            "Received http2 header with status: 403",
            trocar.errors.PermissionDeniedError,
        ),
        (grpc.StatusCode.INTERNAL, "Exception deserializing response!", trocar.errors.InternalServerError),
    ],
)
def test_the_own_text_of_grpc_is_a_detail(
    code: grpc.StatusCode, text: str, kind: type[trocar.TrocarError]
) -> None:
    error = error_from_rpc(Failure(code, text), target="gpu1:50051")
    assert type(error) is kind
    if kind is trocar.errors.ServerUnavailableError:
        assert error.details["grpc"] == text
        assert text not in str(error)
        assert str(error).startswith("no connection to gpu1:50051: ")


def _last_address_refused(port: int) -> str:
    return f"{_ALL}ipv6:%5B::1%5D:{port}: Failed to connect to remote host: Connection refused"


@pytest.fixture
def plain_port() -> Iterator[int]:
    """A port of 127.0.0.1 whose server closes what it does not understand."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = Thread(target=_close_each, args=(listening, 2), daemon=True)
        thread.start()
        yield listening.getsockname()[1]


def _close_each(listening: socket.socket, count: int) -> None:
    for _ in range(count):
        with suppress(OSError):  # the caller may be gone, or the test at its end
            accepted, _ = listening.accept()
            with accepted:
                accepted.recv(16)
                accepted.sendall(b"HTTP/1.1 400\r\n\r\n")


@pytest.fixture
def tls_port(tmp_path: Path) -> Iterator[int]:
    """A port of 127.0.0.1 whose server speaks TLS."""
    certificate = signed(authority(tmp_path), tmp_path, "server", "/CN=localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certificate, certificate.key)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = Thread(target=_shake_hands, args=(listening, context), daemon=True)
        thread.start()
        yield listening.getsockname()[1]


def _shake_hands(listening: socket.socket, context: ssl.SSLContext) -> None:
    accepted, _ = listening.accept()
    with context.wrap_socket(accepted, server_side=True) as spoken:
        spoken.recv(1)


def test_a_plain_server_behind_a_refused_last_address_is_seen(plain_port: int) -> None:
    text, target = _last_address_refused(plain_port), f"localhost:{plain_port}"
    assert "the server speaks plain text" in connection_problem(text, target, is_tls=True)


@pytest.mark.skipif(OPENSSL is None, reason="needs the openssl command to make certificates")
@pytest.mark.parametrize(
    ("is_tls", "cure"), [(False, "connect with tls=True"), (True, "authority that is not trusted here")]
)
def test_a_tls_server_behind_a_refused_last_address_is_seen(tls_port: int, is_tls: bool, cure: str) -> None:
    text, target = _last_address_refused(tls_port), f"localhost:{tls_port}"
    assert cure in connection_problem(text, target, is_tls=is_tls)


def test_without_any_server_the_last_address_is_right() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    problem = connection_problem(_last_address_refused(port), f"localhost:{port}", is_tls=True)
    assert problem == "nothing listens on this port; is the server running there?"


def test_grpc_writes_no_lines_of_its_own(plain_port: int) -> None:
    program = (
        "import trocar\n"
        f"client = trocar.connect('127.0.0.1:{plain_port}', tls=True, retries=0)\n"
        "try:\n"
        "    client.server_info()\n"
        "except trocar.errors.ServerUnavailableError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "the server speaks plain text" in done.stdout
    assert done.stderr == ""
