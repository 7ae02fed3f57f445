"""Who is let in to which method: by nobody's leave, by token, or by client certificate.

The interceptor asks its gate twice. `check_early` comes before a byte of the request is read, so that a
stranger's message is never received; `admit` comes within the call, where certificates are known.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from trocar_api.reasons import ErrorReason
from trocar_server.auth import Caller, LiveGrants
from trocar_server.errors import ServiceError
from trocar_server.rpc.method_scopes import METHOD_SCOPES
from trocar_server.rpc.principal import bearer_token, principal_from

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]


class Gate(Protocol):
    """Decides over every call, but those of health."""

    @property
    def is_guarded(self) -> bool:
        """Whether anybody is ever refused."""
        ...

    def check_early(self, method: str, metadata: Metadata) -> None:
        """Refuse what can be refused by the headers.

        Raises:
            ServiceError: `TOKEN_MISSING`, `TOKEN_INVALID` or `SCOPE_MISSING`.
        """
        ...

    def admit(self, method: str, context: Any) -> str:
        """Return the principal of a call.

        Raises:
            ServiceError: `TOKEN_MISSING`, `TOKEN_INVALID` or `SCOPE_MISSING`.
        """
        ...


@dataclass(frozen=True)
class OpenGate:
    """Everybody may do everything; a bearer token only tells callers apart."""

    is_guarded: bool = False

    def check_early(self, method: str, metadata: Metadata) -> None:
        """Refuse nothing."""

    def admit(self, method: str, context: Any) -> str:
        """Return the hash of the token, see `principal_from`."""
        return principal_from(context.invocation_metadata() or ())


@dataclass
class ReplaceableGate:
    """Another gate, which may be replaced while the server runs."""

    current: Gate

    @property
    def is_guarded(self) -> bool:
        """Whether anybody is ever refused."""
        return self.current.is_guarded

    def check_early(self, method: str, metadata: Metadata) -> None:
        """Ask the gate of the moment; see `Gate`."""
        self.current.check_early(method, metadata)

    def admit(self, method: str, context: Any) -> str:
        """Ask the gate of the moment; see `Gate`."""
        return self.current.admit(method, context)


@dataclass(frozen=True)
class TokenGate:
    """Whoever has a valid token with the scope of the method; its name is the principal."""

    grants: LiveGrants
    is_guarded: bool = True

    def check_early(self, method: str, metadata: Metadata) -> None:
        """Check the token; see `Gate`."""
        self._find(method, metadata)

    def admit(self, method: str, context: Any) -> str:
        """Check the token and return its name; see `Gate`."""
        return self._find(method, context.invocation_metadata() or ())

    def _find(self, method: str, metadata: Metadata) -> str:
        token = bearer_token(metadata)
        if token is None:
            raise ServiceError(
                ErrorReason.TOKEN_MISSING,
                "this server lets nobody in without a token; say trocar.connect(..., token=...) or set "
                "TROCAR_TOKEN, and ask the server's operator for one (`trocar token create`)",
            )
        caller = self.grants.of_token(token)
        if caller is None:  # one text for unknown, expired and revoked: a guess learns nothing
            raise ServiceError(
                ErrorReason.TOKEN_INVALID,
                "the token is not valid on this server; ask its operator for a new one "
                "(`trocar token create`)",
            )
        return _allowed(caller, method)


@dataclass(frozen=True)
class CertificateGate:
    """Whoever has a client certificate of our authority whose name has the scope of the method."""

    grants: LiveGrants
    is_guarded: bool = True

    def check_early(self, method: str, metadata: Metadata) -> None:
        """Refuse nothing: strangers did not come through the handshake."""

    def admit(self, method: str, context: Any) -> str:
        """Return the name of the certificate; see `Gate`."""
        name = certificate_name(context.auth_context())
        caller = self.grants.of_certificate(name)
        return _allowed(caller or Caller(name, frozenset()), method)


def certificate_name(auth_context: Any) -> str:
    """Return the name in a client's certificate: its common name, or else its first alternative name.

    Args:
        auth_context: gRPC's, by property; values are lists of bytes.
    """
    for key in ("x509_common_name", "x509_subject_alternative_name"):
        for value in auth_context.get(key, ()):
            if value:
                return bytes(value).decode("utf-8", "backslashreplace")
    return ""


def _allowed(caller: Caller, method: str) -> str:
    needed = METHOD_SCOPES.get(method)
    if needed in caller.scopes:
        return caller.name
    if needed is None:
        raise ServiceError(ErrorReason.SCOPE_MISSING, "no scope of this server allows this method")
    has = ", ".join(sorted(caller.scopes)) or "none"
    raise ServiceError(
        ErrorReason.SCOPE_MISSING,
        f"this call needs the scope '{needed}', and '{caller.name}' has {has}; ask the server's operator",
        scope=needed,
        principal=caller.name,
    )
