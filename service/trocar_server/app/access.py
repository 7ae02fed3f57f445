"""Access configuration: address checks, TLS credentials and authorization."""

from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc

from trocar_api.reasons import ErrorReason
from trocar_server.auth import LiveGrants, TokenFile
from trocar_server.config import PageConfig, ServerConfig
from trocar_server.errors import ServiceError
from trocar_server.rpc.call.authorization import (
    Authorizer,
    CertificateAuthorizer,
    OpenAuthorizer,
    TokenAuthorizer,
)
from trocar_server.rpc.listen.tls import TlsFiles, server_credentials
from trocar_server.rpc.listen.unix_socket import socket_path


def check_address(config: ServerConfig) -> None:
    """Refuse an address reachable from other hosts, unless callers authenticate and traffic is encrypted.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, with what to set.
    """
    if config.insecure or is_local(config.host):
        return
    has_tls = config.tls_cert is not None and config.tls_key is not None
    has_proof = config.tokens or config.tls_client_ca is not None
    if has_tls and has_proof:
        return
    if has_proof:
        why = "would send tokens in plain text: set tls_cert and tls_key, too"
    else:
        why = (
            "would accept every caller: authentication is off. Set tokens = true or tls_client_ca, and "
            "tls_cert with tls_key"
        )
    raise ServiceError(
        ErrorReason.INVALID_ARGUMENT,
        f"listening on '{config.host}' {why}. Or listen on 127.0.0.1 or unix:/path, or pass --insecure if "
        "a firewall "
        "or a private network restricts access",
    )


def check_page_address(config: PageConfig) -> None:
    """Refuse a page that other hosts could open without TLS: its users would send their tokens in plain text.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, with what to set.
    """
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ServiceError(ErrorReason.INVALID_ARGUMENT, "[page] needs both tls_cert and tls_key, or neither")
    if config.insecure or config.tls_cert is not None or is_local(config.host):
        return
    raise ServiceError(
        ErrorReason.INVALID_ARGUMENT,
        f"a page on '{config.host}' would receive tokens in plain text: set tls_cert and tls_key in [page]. "
        "Or serve it on 127.0.0.1 and use an SSH tunnel, or set insecure if a private network restricts "
        "access",
    )


def insecurity_of(config: ServerConfig) -> str:
    """Describe the protection that `insecure` disables; empty where it is not set, or changes nothing."""
    if not config.insecure:
        return ""
    if is_local(config.host):
        return f"insecure is set but not needed: only this machine can reach '{config.host}'"
    if not (config.tokens or config.tls_client_ca is not None):
        return f"insecure: anyone who can reach '{config.host}' may call every method"
    if config.tls_cert is None:
        return f"insecure: tokens and all data cross the network to '{config.host}' in plain text"
    return ""


def credentials_of(config: ServerConfig) -> grpc.ServerCredentials | None:
    """TLS credentials, or None where TLS is off.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, a file is missing or cannot be used.
    """
    if config.tls_cert is None and config.tls_key is None and config.tls_client_ca is None:
        return None
    if config.tls_cert is None or config.tls_key is None:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT,
            "TLS needs both tls_cert and tls_key; tls_client_ca is used together with these two",
        )
    ca = config.tls_client_ca
    files = TlsFiles(
        config.tls_cert.expanduser(), config.tls_key.expanduser(), None if ca is None else ca.expanduser()
    )
    return server_credentials(files)


def authorizer_of(config: ServerConfig, data_dir: Path, log: Any) -> Authorizer:
    """Return the authorizer. With tokens enabled every call needs one, in addition to a certificate.

    Raises:
        ServiceError: `STORAGE_UNAVAILABLE`, the file of tokens cannot be trusted.
    """
    if not config.tokens and config.tls_client_ca is None:
        return OpenAuthorizer()
    grants = LiveGrants(TokenFile(data_dir))
    if grants.load() == 0:
        log.warning("no token exists yet", advice="trocar admin token create NAME --scope run")
    return TokenAuthorizer(grants) if config.tokens else CertificateAuthorizer(grants)


def is_local(host: str) -> bool:
    """Whether only this machine reaches a host: a loopback address, `localhost` or a Unix socket."""
    if host == "localhost" or socket_path(host):
        return True
    with suppress(ValueError):
        return ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    return False
