"""TLS and client certificates over the wire, with certificates that are renewed meanwhile."""

import socket
import ssl
import time
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import trocar
from tests.support.models.odd_models import Identity
from tests.support.oracles.tiny_training import MODELS as TRAINABLE
from tests.support.oracles.tiny_training import batches, make_trainer
from tests.support.servers.certificates import OPENSSL, Certificate, authority, signed
from tests.support.servers.running_server import RunningServer
from tests.support.servers.serving import Serve, custom
from tests.support.wire.methods import GUARDED, needed_scope
from trocar_server.auth import Scope, TokenFile, live_grants, with_included

pytestmark = pytest.mark.skipif(OPENSSL is None, reason="needs the openssl command to make certificates")

MODELS = {"identity": custom(Identity)}
ROW = np.zeros((1, 3), np.float32)


class Authority:
    """Who signs the certificates of a test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.own = authority(folder)
        self.server = self.sign("server")

    def sign(self, name: str, subject: str = "/CN=localhost", **options: Any) -> Certificate:
        return signed(self.own, self.folder, name, subject, **options)

    def client(self, name: str, subject: str, **options: Any) -> trocar.TlsOptions:
        return self.options(self.sign(name, subject, **options))

    def options(self, own: Certificate | None = None) -> trocar.TlsOptions:
        if own is None:
            return trocar.TlsOptions(ca=self.own.certificate)
        return trocar.TlsOptions(ca=self.own.certificate, certificate=own.certificate, key=own.key)

    def settings(self, data_dir: Path, **more: Any) -> dict[str, Any]:
        files = {"tls_cert": self.server.certificate, "tls_key": self.server.key}
        return {"models": MODELS, "data_dir": data_dir, **files, **more}

    def mutual(self, data_dir: Path, **more: Any) -> dict[str, Any]:
        return self.settings(data_dir, tls_client_ca=self.own.certificate, **more)


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(live_grants, "CHECK_EVERY_S", 0.0)
    return tmp_path / "data"


def grant(data_dir: Path, name: str, *scopes: Scope, certificate: bool = True) -> str:
    file = TokenFile(data_dir)
    _, token = file.add(name, scopes, expires_at_s=None, now_s=time.time(), for_certificate=certificate)
    return token or ""


def target(running: RunningServer) -> str:
    return running.address.replace("127.0.0.1", "localhost")


def connect(running: RunningServer, tls: Any, token: str | None = None) -> trocar.Client:
    return trocar.connect(target(running), tls=tls, token=token, retries=0, timeout_s=30)


def test_a_token_works_over_tls(serve: Serve, trusted: Authority, data_dir: Path) -> None:
    running = serve(**trusted.settings(data_dir, tokens=True))
    token = grant(data_dir, "alice", Scope.RUN, certificate=False)
    with connect(running, trusted.options(), token) as client:
        assert np.array_equal(client.extract("identity", ROW, "identity")["identity"], ROW)
    with connect(running, trusted.options()) as client, pytest.raises(trocar.errors.TokenMissingError):
        client.models()
    with connect(running, None, token) as client, pytest.raises(trocar.errors.ServerUnavailableError):
        client.models()


def test_several_servers_over_tls_are_one(serve: Serve, trusted: Authority, tmp_path: Path) -> None:
    """Their certificate has the name of the first address, and each call and each look-up checks it."""
    models = {**MODELS, **TRAINABLE}
    running = [serve(**trusted.settings(tmp_path / name, models=models)) for name in ("one", "other")]
    both = ",".join(map(target, running))
    with trocar.connect(both, tls=trusted.options(), timeout_s=60) as client:
        for _ in range(10):
            assert np.array_equal(client.extract("identity", ROW, "identity")["identity"], ROW)
        with trocar.connect(target(running[1]), tls=trusted.options()) as second:
            trainer = make_trainer(second)
            client.trainer(trainer.trainer_id).step(*next(iter(batches(1))))
            assert trainer.info().update_count == 1
        running[0].run(lambda: running[0].app.rpc.stop(0))
        for _ in range(10):
            assert np.array_equal(client.extract("identity", ROW, "identity")["identity"], ROW)


def test_several_servers_of_another_authority_are_not_talked_to(
    serve: Serve, trusted: Authority, tmp_path: Path
) -> None:
    (tmp_path / "ca").mkdir()
    stranger = Authority(tmp_path / "ca")
    running = [serve(**stranger.settings(tmp_path / name)) for name in ("one", "other")]
    both = ",".join(map(target, running))
    with (
        trocar.connect(both, tls=trusted.options(), retries=0) as client,
        pytest.raises(trocar.errors.ServerUnavailableError, match=r"(?i)certificate|tls"),
    ):
        client.server_info()


def test_without_a_certificate_of_the_authority_nobody_gets_through_the_handshake(
    serve: Serve, trusted: Authority, data_dir: Path, tmp_path: Path
) -> None:
    running = serve(**trusted.mutual(data_dir))
    grant(data_dir, "alice", Scope.ADMIN)
    own = signed(authority(tmp_path, "stranger"), tmp_path, "alice", "/CN=alice")
    for tls in (None, trusted.options(), trusted.options(own)):
        with connect(running, tls) as client, pytest.raises(trocar.errors.ServerUnavailableError):
            client.models()


def test_a_certificate_may_do_what_its_name_was_granted(
    serve: Serve, trusted: Authority, data_dir: Path
) -> None:
    running = serve(**trusted.mutual(data_dir))
    with connect(running, trusted.client("alice", "/O=x/CN=alice")) as client:
        with pytest.raises(trocar.errors.ScopeMissingError, match="'alice' has none"):
            client.models()
        grant(data_dir, "alice", Scope.RUN)
        assert np.array_equal(client.extract("identity", ROW, "identity")["identity"], ROW)
        with pytest.raises(trocar.errors.ScopeMissingError, match="admin"):
            client.unload("identity")
        TokenFile(data_dir).revoke("alice")
        with pytest.raises(trocar.errors.ScopeMissingError):
            client.models()


@pytest.mark.parametrize(
    ("subject", "names", "principal"),
    [
        ("/O=x/CN=alice", "URI:spiffe://x/bob", "alice"),
        ("/O=x", "URI:spiffe://x/bob,DNS:carol.x", "URI:spiffe://x/bob"),
        ("/O=x", "DNS:carol.x,URI:spiffe://x/bob", "DNS:carol.x"),
        ("/O=x", "email:dave@x.org", "email:dave@x.org"),
        ("/O=x", "IP:10.0.0.1", "IP:10.0.0.1"),
        ("/O=x", "otherName:1.2.3.4;UTF8:eve,DNS:frank.x", "DNS:frank.x"),
        ("/CN=DNS:alice", "", "CN:DNS:alice"),
        ("/CN=J\u00f6rg", "", "J\u00f6rg"),
    ],
)
def test_the_principal_is_the_common_name_or_the_first_alternative_name_with_its_kind(
    serve: Serve, trusted: Authority, data_dir: Path, subject: str, names: str, principal: str
) -> None:
    running = serve(**trusted.mutual(data_dir))
    grant(data_dir, principal, Scope.READ)
    own = signed(trusted.own, trusted.folder, "some", subject, names)
    with connect(running, trusted.options(own)) as client:
        assert [model.model_id for model in client.models()] == ["identity"]


NAMES_OF_ALICE = {
    "alice": ("/CN=alice", ""),
    "DNS:alice": ("/O=x", "DNS:alice"),
    "URI:alice": ("/O=x", "URI:alice"),
    "email:alice": ("/O=x", "email:alice"),
    "CN:DNS:alice": ("/CN=DNS:alice", ""),
    "CN:CN:alice": ("/CN=CN:alice", ""),
}


@pytest.mark.parametrize("granted", NAMES_OF_ALICE)
def test_names_of_different_kinds_are_different_callers(
    serve: Serve, trusted: Authority, data_dir: Path, granted: str
) -> None:
    running = serve(**trusted.mutual(data_dir))
    grant(data_dir, granted, Scope.READ)
    for name, (subject, names) in NAMES_OF_ALICE.items():
        own = signed(trusted.own, trusted.folder, "some", subject, names)
        with connect(running, trusted.options(own)) as client:
            if name == granted:
                client.models()
            else:
                with pytest.raises(trocar.errors.ScopeMissingError, match=f"'{name}' has none"):
                    client.models()


def test_names_of_no_known_kind_are_nobodys(serve: Serve, trusted: Authority, data_dir: Path) -> None:
    """gRPC calls all of them alike, so whoever were granted rights by that text would share them."""
    running = serve(**trusted.mutual(data_dir))
    grant(data_dir, "other types of SAN", Scope.ADMIN)
    own = signed(trusted.own, trusted.folder, "some", "/O=x", "RID:1.2.3.4")
    with connect(running, trusted.options(own)) as client, pytest.raises(trocar.errors.ScopeMissingError):
        client.models()


def test_with_tokens_too_a_certificate_alone_does_not_do(
    serve: Serve, trusted: Authority, data_dir: Path
) -> None:
    running = serve(**trusted.mutual(data_dir, tokens=True))
    grant(data_dir, "alice", Scope.ADMIN)
    token = grant(data_dir, "bob", Scope.READ, certificate=False)
    tls = trusted.client("alice", "/CN=alice")
    with connect(running, tls) as client, pytest.raises(trocar.errors.TokenMissingError):
        client.models()
    with connect(running, tls, token) as client:
        client.models()
        with pytest.raises(trocar.errors.ScopeMissingError, match="'bob' has read"):
            client.unload("identity")


@pytest.mark.parametrize("scope", [None, *Scope])
def test_every_method_asks_the_certificates_scope(
    serve: Serve, trusted: Authority, data_dir: Path, scope: Scope | None
) -> None:
    running = serve(**trusted.mutual(data_dir, reflection=True))
    if scope is not None:
        grant(data_dir, "alice", scope)
    scopes = with_included([scope] if scope else [])
    credentials = trusted.client("alice", "/CN=alice").credentials()
    with grpc.secure_channel(target(running), credentials) as channel:
        for method in GUARDED:
            is_denied = method.call(channel).code() is grpc.StatusCode.PERMISSION_DENIED
            assert is_denied == (needed_scope(method) not in scopes), method.path


def served_certificate(running: RunningServer, trusted: Authority) -> bytes:
    """Shake hands without gRPC and return the certificate that came."""
    context = ssl.create_default_context(cafile=trusted.own.certificate)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", running.app.rpc.port)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        return secure.getpeercert(binary_form=True) or b""


def der(certificate: Path) -> bytes:
    return ssl.PEM_cert_to_DER_cert(certificate.read_text())


def test_a_renewed_certificate_counts_for_the_next_connection(
    serve: Serve, trusted: Authority, data_dir: Path, tmp_path: Path
) -> None:
    files = signed(trusted.own, tmp_path, "live")
    first, second = der(files.certificate), trusted.sign("renewed")
    settings = trusted.settings(data_dir, tls_cert=files.certificate, tls_key=files.key)
    running = serve(**settings)
    with connect(running, trusted.options()) as client:
        client.models()
        assert served_certificate(running, trusted) == first
        second.certificate.replace(files.certificate)
        assert served_certificate(running, trusted) == first  # it does not fit the key yet
        second.key.replace(files.key)
        assert served_certificate(running, trusted) == der(files.certificate) != first
        client.models()
    with connect(running, trusted.options()) as client:
        client.models()
    files.certificate.unlink()
    with connect(running, trusted.options()) as client:
        client.models()


def test_a_certificate_that_could_not_be_read_at_first_is_loaded_when_it_can(
    serve: Serve, trusted: Authority, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renewal writes the key for root alone, and changes its mode a moment later."""
    files = signed(trusted.own, tmp_path, "live")
    first, second = der(files.certificate), trusted.sign("late")
    running = serve(**trusted.settings(data_dir, tls_cert=files.certificate, tls_key=files.key))

    def refuse(_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr("trocar_server.rpc.listen.tls._check", refuse)  # who runs the tests may be root
        second.key.replace(files.key)
        second.certificate.replace(files.certificate)
        assert served_certificate(running, trusted) == first
    files.key.chmod(0o640)
    assert served_certificate(running, trusted) == der(files.certificate) != first
