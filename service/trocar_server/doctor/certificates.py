"""Certificate validity periods, with nothing but Python's `ssl`.

The standard library reads a certificate's dates only of a peer that it has verified. So the files shake hands
with themselves, in memory: the server's end has certificate and key, the client's end trusts that very file.
"""

import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Validity:
    """Names of a certificate, and its expiry."""

    ends_at_s: float
    """Seconds since 1970."""
    names: str
    """Host names and addresses, or the subject's common name."""


def validity_of(certificate: Path, key: Path) -> Validity:
    """Validity of a server's certificate.

    Raises:
        ssl.SSLError: The key does not fit; or it has expired, or is not valid yet, as `verify_message` says.
    """
    result = _shaken(_server_context(certificate, key), _client_context(certificate))
    names = ", ".join(value for _, value in result.get("subjectAltName", ())) or _common_name(result)
    return Validity(ssl.cert_time_to_seconds(result["notAfter"]), names)


def validity_of_authorities(path: Path) -> Validity:
    """Validity of the CA that expires first.

    Raises:
        ssl.SSLError: There is no certificate of an authority in the file.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(path)
    result: list[Any] = [*context.get_ca_certs()]
    if not result:
        raise ssl.SSLError(1, "it contains no CA certificate")
    first = min(result, key=lambda entry: ssl.cert_time_to_seconds(entry["notAfter"]))
    return Validity(ssl.cert_time_to_seconds(first["notAfter"]), _common_name(first))


def _server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key, password="")
    return context


def _client_context(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # the server's own certificate is trust enough
    context.load_verify_locations(certificate)
    return context


def _shaken(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    """Shake hands in memory; returns what the client has seen of the server's certificate."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_end = client.wrap_bio(down, up)
    server_end = server.wrap_bio(up, down, server_side=True)
    for _ in range(8):  # three turns are enough
        with suppress(ssl.SSLWantReadError):
            client_end.do_handshake()
            break
        with suppress(ssl.SSLWantReadError):
            server_end.do_handshake()
    result: dict[str, Any] = client_end.getpeercert() or {}
    return result


def _common_name(outcome: dict[str, Any]) -> str:
    pairs = [pair for part in outcome.get("subject", ()) for pair in part]
    return next((value for key, value in pairs if key == "commonName"), "")
