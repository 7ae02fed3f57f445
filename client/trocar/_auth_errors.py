"""Who is not let in, or not to this call; users find these exceptions in `trocar.errors`."""

from trocar._error_base import InvalidRequestError
from trocar_api.reasons import ErrorReason


class PermissionDeniedError(InvalidRequestError):
    """The token is missing, wrong or does not allow the call."""


class TokenMissingError(PermissionDeniedError, reason=ErrorReason.TOKEN_MISSING):
    """The server lets nobody in without a token; see `connect`'s argument `token`."""


class TokenInvalidError(PermissionDeniedError, reason=ErrorReason.TOKEN_INVALID):
    """The token is unknown to the server, expired or revoked."""


class ScopeMissingError(PermissionDeniedError, reason=ErrorReason.SCOPE_MISSING):
    """The token or certificate does not allow this call; `details` has the `scope` that it needs."""
