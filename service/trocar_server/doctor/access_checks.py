"""Access checks: address, tokens, certificates."""

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from trocar_server.app.access import check_address, credentials_of, insecurity_of
from trocar_server.auth import TokenFile
from trocar_server.config import ServerConfig
from trocar_server.doctor.certificates import Validity, validity_of, validity_of_authorities
from trocar_server.doctor.finding import Finding, fail, ok, warn
from trocar_server.doctor.storage_checks import used_folder
from trocar_server.errors import ServiceError
from trocar_server.rpc.listen.unix_socket import check_free, socket_path

_SOON_S = 14 * 24 * 3600
_MAKE_TOKEN = "trocar admin token create NAME --scope run"


def check_open_to(config: ServerConfig) -> Iterator[Finding]:
    """Check that an address reachable by others requires authentication, over TLS."""
    try:
        check_address(config)
    except ServiceError as error:
        yield fail(
            "authentication", error.message, "trocar admin token create, tokens = true, tls_cert and tls_key"
        )
        return
    if problem := insecurity_of(config):
        yield warn(
            "authentication",
            problem,
            "restrict access with a firewall, or set tokens = true, tls_cert and tls_key instead",
        )
    else:
        ways = [name for name, on in (("tokens", config.tokens), ("mTLS", config.tls_client_ca)) if on]
        yield ok("authentication", " and ".join(ways) or f"off; only this machine can reach '{config.host}'")


def check_port(config: ServerConfig) -> Iterator[Finding]:
    """Check that the address is free."""
    advice = "stop the process that listens there, or choose another port; expected if it is this server"
    try:
        path = socket_path(config.host)
        if path is not None:
            check_free(path)
            if not path.parent.is_dir():
                yield fail("address", f"the folder of '{path}' does not exist", f"mkdir {path.parent}")
                return
            yield ok("address", f"'{config.host}' is free")
            return
        _bind(config.host, config.port)
    except ServiceError as error:
        yield warn("address", error.message, advice)
    except OSError as error:
        yield warn("address", f"{config.host}:{config.port} cannot be bound: {error.strerror}", advice)
    else:
        yield ok("address", f"{config.host}:{config.port or '(any port)'} is free")


def check_tokens(config: ServerConfig) -> Iterator[Finding]:
    """Check the token file: its permissions, its grants and their expiry."""
    file, now = TokenFile(used_folder(config)), time.time()
    is_asked = config.tokens or config.tls_client_ca is not None
    try:
        grants = file.read()
    except ServiceError as error:
        advice = f"chmod 600 '{file.path}', and make the server's user its owner"
        yield fail("tokens", error.message, advice) if is_asked else warn("tokens", error.message, advice)
        return
    valid = [grant for grant in grants if not grant.is_expired(now)]
    if not is_asked:
        if valid:
            text = f"{len(valid)} valid, but the server does not ask for tokens"
            yield warn("tokens", text, "set tokens = true")
        return
    if not valid:
        yield warn("tokens", "no valid token", _MAKE_TOKEN)
        return
    yield ok("tokens", f"{len(valid)} valid, {len(grants) - len(valid)} expired")
    for grant in valid:
        if grant.expires_at_s is not None and grant.expires_at_s - now < _SOON_S:
            days = (grant.expires_at_s - now) / 86_400
            text = f"that of '{grant.name}' ({grant.grant_id}) expires in {days:.1f} days"
            yield warn(
                "tokens",
                text,
                f"trocar admin token create '{grant.name}' --scope ..., then give it to the client",
            )


def check_certificates(config: ServerConfig) -> Iterator[Finding]:
    """Check that certificate and key belong together, and how long they are valid."""
    try:
        if credentials_of(config) is None:
            return
    except ServiceError as error:
        yield fail("certificate", error.message, "openssl x509 -in CERT -noout -text shows what a file holds")
        return
    if config.tls_cert is not None and config.tls_key is not None:
        yield _judged(
            "certificate", config.tls_cert, lambda: validity_of(_file(config.tls_cert), _file(config.tls_key))
        )
    if config.tls_client_ca is not None:
        yield _judged(
            "client CA", config.tls_client_ca, lambda: validity_of_authorities(_file(config.tls_client_ca))
        )


def _judged(subject: str, path: Path, look: Callable[[], Validity]) -> Finding:
    renew = f"replace '{path.name}'; a running server uses the new one from the next connection on"
    try:
        validity = look()
    except ssl.SSLError as error:
        return fail(subject, f"'{path.name}': {getattr(error, 'verify_message', '') or error.reason}", renew)
    left_s = validity.ends_at_s - time.time()
    text = f"'{path.name}' for {validity.names or 'no name'}, {left_s / 86_400:.0f} days left"
    if left_s <= 0:
        return fail(subject, text, renew)
    return warn(subject, text, renew) if left_s < _SOON_S else ok(subject, text)


def _file(path: Path | None) -> Path:
    return Path() if path is None else path.expanduser()


def _bind(host: str, port: int) -> None:
    """Bind and release again; a name is resolved as gRPC would."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        with suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(address)
