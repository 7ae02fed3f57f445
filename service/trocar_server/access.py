"""From the configuration to who is let in: address, TLS and gate."""

from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import grpc

from trocar_api.reasons import ErrorReason
from trocar_server.auth import LiveGrants, TokenFile
from trocar_server.config import ServerConfig
from trocar_server.errors import ServiceError
from trocar_server.rpc.gates import CertificateGate, Gate, OpenGate, TokenGate
from trocar_server.rpc.tls import TlsFiles, server_credentials
from trocar_server.rpc.unix_socket import socket_path


def check_address(config: ServerConfig) -> None:
    """Refuse an address that others reach, unless they must prove who they are and nobody can listen in.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, with what to set.
    """
    if config.insecure or _is_local(config.host):
        return
    has_tls = config.tls_cert is not None and config.tls_key is not None
    has_proof = config.tokens or config.tls_client_ca is not None
    if has_tls and has_proof:
        return
    if has_proof:
        why = "would send tokens in plain text: set tls_cert and tls_key, too"
    else:
        why = (
            "would let everybody in: there is no authentication. Set tokens = true or tls_client_ca, and "
            "tls_cert with tls_key"
        )
    raise ServiceError(
        ErrorReason.INVALID_ARGUMENT,
        f"listening on '{config.host}' {why}. Or listen on 127.0.0.1 or unix:/path, or say --insecure where "
        "the network itself keeps strangers out",
    )


def credentials_of(config: ServerConfig) -> grpc.ServerCredentials | None:
    """Return what TLS needs, or None where it is off.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, a file is missing or cannot be used.
    """
    if config.tls_cert is None and config.tls_key is None and config.tls_client_ca is None:
        return None
    if config.tls_cert is None or config.tls_key is None:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT, "TLS needs both tls_cert and tls_key; tls_client_ca comes on top"
        )
    ca = config.tls_client_ca
    files = TlsFiles(
        config.tls_cert.expanduser(), config.tls_key.expanduser(), None if ca is None else ca.expanduser()
    )
    return server_credentials(files)


def gate_of(config: ServerConfig, data_dir: Path, log: Any) -> Gate:
    """Return who decides over calls. With tokens every call needs one, also on top of a certificate.

    Raises:
        ServiceError: `STORAGE_UNAVAILABLE`, the file of tokens cannot be trusted.
    """
    if not config.tokens and config.tls_client_ca is None:
        return OpenGate()
    grants = LiveGrants(TokenFile(data_dir))
    if grants.load() == 0:
        log.warning("nobody has any rights yet", advice="trocar token create NAME --scope run")
    return TokenGate(grants) if config.tokens else CertificateGate(grants)


def _is_local(host: str) -> bool:
    if host == "localhost" or socket_path(host):
        return True
    with suppress(ValueError):
        return ip_address(host).is_loopback
    return False
