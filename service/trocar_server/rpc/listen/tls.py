"""TLS for the server: certificates from files, read again when they change.

gRPC fetches the configuration before every handshake (`dynamic_ssl_server_credentials`, which grpc.aio takes
as well: tried with 1.81), so a renewed certificate counts for the next connection, without a restart. One
that does not match its key, as in the middle of a renewal, is ignored.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

_log = structlog.get_logger("trocar")


@dataclass(frozen=True)
class TlsFiles:
    """The server's certificate files; all PEM."""

    certificate: Path
    """The chain, the server's own first."""
    key: Path
    """Its private key, without a password."""
    client_ca: Path | None = None
    """The CA of client certificates; if set, every client must have one (mTLS)."""

    def paths(self) -> tuple[Path, ...]:
        """Return every file."""
        return (self.certificate, self.key, *((self.client_ca,) if self.client_ca else ()))


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Read the files and return gRPC's credentials, which read them again when they have changed.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, a file cannot be read or used.
    """
    reader = _CertificateReader(files)
    first = reader.read()
    credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
        first, reader.changed, require_client_authentication=files.client_ca is not None
    )
    return credentials


class _CertificateReader:
    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._seen: tuple[tuple[int, ...], ...] = ()

    def read(self) -> Any:
        """Read and check all files; return gRPC's configuration."""
        try:
            self._seen = self._look()
            _check(self._files)
            key, certificate, *authorities = (
                path.read_bytes()
                for path in (self._files.key, self._files.certificate, *self._files.paths()[2:])
            )
        except OSError as error:  # ssl's errors are of this kind, too
            raise _refused(self._files, error) from None
        return grpc.ssl_server_certificate_configuration(
            [(key, certificate)], root_certificates=authorities[0] if authorities else None
        )

    def changed(self) -> Any:
        """Return a new configuration where a file has changed, or None. gRPC's thread calls it."""
        try:
            if self._look() == self._seen:
                return None
            configuration = self.read()
        except (ServiceError, OSError) as error:
            _log.error("certificate not reloaded: the old one stays in use", problem=str(error))
            return None
        _log.info("certificate reloaded")
        return configuration

    def _look(self) -> tuple[tuple[int, ...], ...]:
        result = (path.stat() for path in self._files.paths())
        # The time of change also tells that files have become readable: a mode or an owner is set afterwards.
        return tuple((each.st_ino, each.st_mtime_ns, each.st_ctime_ns, each.st_size) for each in result)


def _check(files: TlsFiles) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.certificate, files.key, password=_no_password)
    if files.client_ca:
        context.load_verify_locations(files.client_ca)


def _no_password() -> str:
    """Password callback for encrypted keys: none can be typed."""
    return ""


def _why(error: OSError) -> str:
    """Return why files cannot be used; OpenSSL's own text is of its source."""
    if not isinstance(error, ssl.SSLError):
        return error.strerror or type(error).__name__
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key is of another certificate"
    return "one of them is no PEM file of its kind, or the key needs a password"


def _refused(files: TlsFiles, error: OSError) -> ServiceError:
    names = ", ".join(f"'{path.name}'" for path in files.paths())
    why = _why(error)
    return ServiceError(
        ErrorReason.INVALID_ARGUMENT,
        f"TLS cannot use {names}: {why}; tls_cert and tls_key are PEM files that belong together, the key "
        "without a password, tls_client_ca holds certificates",
    )
