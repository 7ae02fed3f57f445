"""What is wrong with a field of a request."""

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

MAX_TEXT_CHARACTERS = 1024
"""The longest selector, alias and name."""


def invalid(field: str, problem: str, reason: ErrorReason = ErrorReason.INVALID_ARGUMENT) -> ServiceError:
    """Name the field of a request that is wrong."""
    return ServiceError(reason, f"{field}: {problem}", field=field)
