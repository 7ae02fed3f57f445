"""Authorization per method: open, bearer token or client certificate.

The interceptor calls its authorizer twice. `check_early` comes before a byte of the request is read, so that
the message of an unauthorized caller is never received; `admit` runs within the call, where certificates are
known.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from trocar_api.reasons import ErrorReason
from trocar_server.auth import Caller, LiveGrants, Scope
from trocar_server.caller import ANONYMOUS, set_operator
from trocar_server.errors import ServiceError
from trocar_server.rpc.call.method_scopes import METHOD_SCOPES
from trocar_server.rpc.transfer.messages import CallContext

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]

_SCHEME = "bearer"

_ALTERNATIVE_NAMES = {"URI": "peer_uri", "DNS": "peer_dns", "email": "peer_email", "IP": "peer_ip"}
"""The kinds of a certificate's alternative names as OpenSSL writes them, and gRPC's property of each."""

_KIND_PREFIXES = tuple(f"{kind}:" for kind in (*_ALTERNATIVE_NAMES, "CN"))


def principal_from(metadata: Metadata) -> str:
    """Principal by the metadata of a call, if tokens are not checked; see `principal_of`."""
    token = bearer_token(metadata)
    return ANONYMOUS if token is None else _hashed(token)


def bearer_token(metadata: Metadata) -> str | None:
    """Bearer token in the metadata of a call, or None."""
    for key, value in metadata:
        if key.lower() != "authorization" or not isinstance(value, str):
            continue
        scheme, _, token = value.strip().partition(" ")
        if scheme.lower() == _SCHEME and token.strip():
            return token.strip()
    return None


def _hashed(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


class Authorizer(Protocol):
    """Authorizes every call except health checks."""

    @property
    def is_guarded(self) -> bool:
        """Whether any call can be denied."""
        ...

    def check_early(self, method: str, metadata: Metadata) -> None:
        """Deny calls that can be denied by their headers.

        Raises:
            ServiceError: `TOKEN_MISSING`, `TOKEN_INVALID` or `SCOPE_MISSING`.
        """
        ...

    def admit(self, method: str, context: CallContext) -> str:
        """Return the principal of a call.

        Raises:
            ServiceError: `TOKEN_MISSING`, `TOKEN_INVALID` or `SCOPE_MISSING`.
        """
        ...


@dataclass(frozen=True)
class OpenAuthorizer:
    """Every call is authorized; a bearer token only distinguishes callers."""

    is_guarded: bool = False

    def check_early(self, method: str, metadata: Metadata) -> None:
        """Deny nothing."""

    def admit(self, method: str, context: CallContext) -> str:
        """Return the hash of the token, as `principal_of` says; `ANONYMOUS` without one."""
        set_operator(True)
        token = bearer_token(context.invocation_metadata() or ())
        return ANONYMOUS if token is None else _hashed(token)


class ReplaceableAuthorizer:
    """Authorizer with the checks of another one, replaceable while the server runs.

    Args:
        current: The authorizer to begin with.
    """

    def __init__(self, current: Authorizer) -> None:
        self.replace(current)

    def replace(self, current: Authorizer) -> None:
        """Check calls with this authorizer from now on."""
        self.current, self.is_guarded = current, current.is_guarded
        self.check_early, self.admit = current.check_early, current.admit


@dataclass(frozen=True)
class TokenAuthorizer:
    """Authorizes by valid token with the scope of the method; the token's name is the principal."""

    grants: LiveGrants
    is_guarded: bool = True

    def check_early(self, method: str, metadata: Metadata) -> None:
        """Check the token; see `Authorizer`."""
        self._find(method, metadata)

    def admit(self, method: str, context: CallContext) -> str:
        """Check the token and return its name; see `Authorizer`."""
        return self._find(method, context.invocation_metadata() or ())

    def _find(self, method: str, metadata: Metadata) -> str:
        token = bearer_token(metadata)
        if token is None:
            raise ServiceError(
                ErrorReason.TOKEN_MISSING,
                "this server requires a token; pass trocar.connect(..., token=...) or set TROCAR_TOKEN, and "
                "ask the server's operator for a token (`trocar admin token create`)",
            )
        caller = self.grants.of_token(token)
        if caller is None:  # one text for unknown, expired and revoked tokens: a guess reveals nothing
            raise ServiceError(
                ErrorReason.TOKEN_INVALID,
                "the token is not valid on this server; ask its operator for a new one "
                "(`trocar admin token create`)",
            )
        return _allowed(caller, method)


@dataclass(frozen=True)
class CertificateAuthorizer:
    """Authorizes by client certificate of our CA, whose name has the scope of the method."""

    grants: LiveGrants
    is_guarded: bool = True

    def check_early(self, method: str, metadata: Metadata) -> None:
        """Deny nothing: the TLS handshake has already rejected unknown clients."""

    def admit(self, method: str, context: CallContext) -> str:
        """Return the name of the certificate; see `Authorizer`."""
        name = certificate_name(context.auth_context())
        caller = self.grants.of_certificate(name)
        return _allowed(caller or Caller(name, frozenset()), method)


def certificate_name(auth_context: Mapping[str, Iterable[bytes]]) -> str:
    """Name in a client's certificate; names of different kinds never coincide.

    The common name as it is, `alice`; without one the first alternative name with its kind, `DNS:alice` or
    `URI:alice`. A common name that begins like one of these is written `CN:DNS:alice`. Empty if no name has a
    kind that gRPC distinguishes.

    Args:
        auth_context: gRPC's, by property; values are lists of bytes.
    """
    common = next(filter(None, auth_context.get("x509_common_name", ())), b"")
    if common:
        name = _text(common)
        return f"CN:{name}" if name.startswith(_KIND_PREFIXES) else name
    for value in filter(None, auth_context.get("x509_subject_alternative_name", ())):
        for kind, key in _ALTERNATIVE_NAMES.items():
            if value in auth_context.get(key, ()):
                return f"{kind}:{_text(value)}"
    return ""


def _text(name: bytes) -> str:
    return bytes(name).decode("utf-8", "backslashreplace")


def _allowed(caller: Caller, method: str) -> str:
    needed = METHOD_SCOPES.get(method)
    if needed in caller.scopes:
        set_operator(Scope.ADMIN in caller.scopes)
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
