"""Checks of a running server: reachability, and compatibility with the clients installed here."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from trocar_api.v1 import server_pb2
from trocar_api.v1.server_pb2_grpc import ServerServiceStub
from trocar_api.versions import is_understood
from trocar_server import __version__
from trocar_server.app.access import is_local
from trocar_server.doctor.finding import Finding, fail, ok, warn

_TIMEOUT_S = 5.0
_SLOW_S = 0.05
_HTTPS = "https://"
_WANTED = ("models", "training", "server_id", "replicas")


@dataclass(frozen=True)
class Target:
    """Address of a server, and the credentials for it."""

    address: str
    token: str = ""
    ca: Path | None = None
    """Trusted CA, for a server with TLS; those that gRPC comes with when None."""
    tls: bool = False
    """Whether to connect with TLS; so do `ca`, and an address that begins with `https://`."""

    @property
    def has_tls(self) -> bool:
        """Whether the connection is encrypted."""
        return self.tls or self.ca is not None or self.address.startswith(_HTTPS)

    @property
    def sends_token_in_plain_text(self) -> bool:
        """Whether a network would see the token."""
        host = self.address.rpartition(":")[0].removeprefix("[").removesuffix("]")
        is_near = is_local(self.address) or is_local(host)
        return bool(self.token) and not self.has_tls and not is_near

    def channel(self) -> grpc.Channel:
        """Open a channel."""
        address = self.address.removeprefix(_HTTPS)
        if not self.has_tls:
            return grpc.insecure_channel(address)
        ca = None if self.ca is None else self.ca.read_bytes()
        return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca))


def check_server(target: Target) -> Iterator[Finding]:
    """Ask a running server for its health and its version."""
    if target.sends_token_in_plain_text:
        yield fail(
            "server",
            f"not asked: a token to {target.address} would be sent in plain text",
            "connect with TLS: --tls-ca FILE, or --tls for a certificate of a public authority",
        )
        return
    with target.channel() as channel:
        healthy = _health(target, channel)
        yield healthy
        if healthy.level == "FAIL":
            return
        metadata = (("authorization", f"Bearer {target.token}"),) if target.token else ()
        try:
            info = ServerServiceStub(channel).GetServerInfo(
                server_pb2.GetServerInfoRequest(), timeout=_TIMEOUT_S, metadata=metadata
            )
        except grpc.RpcError as error:
            advice = "give --token, or set TROCAR_TOKEN; its scope read is enough"
            yield warn("server's version", f"it reports no information: {error.details()}", advice)
            return
        yield _skew(info.version)
        yield ok("server's device", f"{info.device}, torch {info.torch_version}")
        yield from map(_feature, info.features)


def _health(target: Target, channel: grpc.Channel) -> Finding:
    stub: Any = health_pb2_grpc.HealthStub(channel)  # its types lack Check
    try:
        stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)  # connects
        started = time.perf_counter()
        status = stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S).status
    except grpc.RpcError as error:
        advice = "is it running, and does it use TLS (--tls, --tls-ca)? See its log"
        return fail("server", f"{target.address} does not answer: {error.code().name}", advice)
    seconds = time.perf_counter() - started
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
    text = f"{target.address} is {name}, {seconds * 1000:.1f} ms"
    if status != health_pb2.HealthCheckResponse.SERVING:
        return warn(
            "server",
            text,
            "it is starting, stopping or draining (trocar admin drain --undo ends a drain); see its log",
        )
    return warn("server", text, "is its machine overloaded?") if seconds > _SLOW_S else ok("server", text)


def _skew(version: str) -> Finding:
    text = f"server {version}, here {__version__}"
    if not is_understood(__version__, version):
        return fail("versions", f"{text}: it refuses clients of this version", "update the server")
    if not is_understood(version, __version__):
        return warn("versions", f"{text}: older than the server", "update this installation when convenient")
    return ok("versions", text)


def _feature(feature: server_pb2.Feature) -> Finding:
    """Finding about a disabled feature: a warning for models and trainers that cannot be used."""
    subject = f"server's {feature.name}"
    if feature.is_on:
        return ok(subject, feature.reason or "on")
    if feature.name in _WANTED:
        return warn(subject, feature.reason, "fix the cause, then reload or restart the server")
    return ok(subject, f"off: {feature.reason}")
