"""What is wrong with a field of a request."""

from collections.abc import Iterator
from contextlib import contextmanager

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

MAX_TEXT_CHARACTERS = 1024
"""The longest selector, alias and name."""


def invalid(field: str, problem: str, reason: ErrorReason = ErrorReason.INVALID_ARGUMENT) -> ServiceError:
    """Name the field of a request that is wrong."""
    return ServiceError(reason, f"{field}: {problem}", field=field)


@contextmanager
def named(field: str) -> Iterator[None]:
    """Name the field in errors that do not."""
    try:
        yield
    except ServiceError as error:
        if "field" in error.details:
            raise
        details = {**error.details, "field": field}
        raise ServiceError(error.reason, f"{field}: {error.message}", **details) from None
