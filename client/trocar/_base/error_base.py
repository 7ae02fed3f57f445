"""Base classes of call errors; users find them in `trocar.errors`."""

from collections.abc import Mapping

from trocar_api.reasons import ErrorReason

EXCEPTIONS: dict[ErrorReason, type["TrocarError"]] = {}
"""The exception class of every reason; each class enters itself. A contract test walks it."""

_PUBLIC_MODULE = "trocar.errors"
"""What a traceback and a pickle say of an exception, wherever its class is written."""


class TrocarError(Exception):
    """Any failed call.

    Args:
        message: What happened and what to do next, for people.
        reason: The stable reason; by default that of the class.
        details: Extra facts as text, for example the nearest names.
        request_id: Id of this call in the server's log; empty when it was never sent.
    """

    reason: ErrorReason | None = None
    """The stable reason; None without one, as when nobody answers."""

    def __init_subclass__(cls, reason: ErrorReason | None = None) -> None:
        super().__init_subclass__()
        if cls.__module__.startswith("trocar._"):
            cls.__module__ = _PUBLIC_MODULE
        if reason is not None:
            cls.reason = reason
            EXCEPTIONS[reason] = cls

    def __init__(
        self,
        message: str,
        *,
        reason: ErrorReason | None = None,
        details: Mapping[str, str] | None = None,
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.reason = reason or type(self).reason
        self.details: dict[str, str] = dict(details or {})
        self.request_id = request_id


TrocarError.__module__ = _PUBLIC_MODULE


class NotFoundError(TrocarError):
    """The server does not know a name; the message lists similar ones."""


class ModelError(TrocarError):
    """The model exists but cannot be used now."""


class InvalidRequestError(TrocarError):
    """The request is invalid; a retry does not help."""


class ServerError(TrocarError):
    """The server could not serve the call now; a retry may succeed later."""
