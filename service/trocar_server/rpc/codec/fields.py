"""Field errors: the field of a request, and why it is invalid."""

from collections.abc import Iterator
from contextlib import contextmanager

from trocar_api.reasons import ErrorReason
from trocar_server.config import Limits
from trocar_server.errors import ServiceError

MAX_TEXT_CHARACTERS = 1024
"""The longest selector, alias and name."""
_MAX_REQUEST_ID_CHARACTERS = 64


def invalid(field: str, problem: str, reason: ErrorReason = ErrorReason.INVALID_ARGUMENT) -> ServiceError:
    """Error for an invalid field of a request."""
    return ServiceError(reason, f"{field}: {problem}", field=field)


@contextmanager
def named(field: str) -> Iterator[None]:
    """Add the field to errors that do not name it."""
    try:
        yield
    except ServiceError as error:
        if "field" in error.details:
            raise
        details = {**error.details, "field": field}
        raise ServiceError(error.reason, f"{field}: {error.message}", **details) from None


def check_count(
    field: str, count: int, limit: int, reason: ErrorReason = ErrorReason.INVALID_ARGUMENT
) -> None:
    """Check the length of a list before its entries become Python objects: a message can have millions.

    Raises:
        ServiceError: With the reason, and the field named.
    """
    if count > limit:
        raise invalid(field, f"has {count:,} entries, the limit is {limit:,}", reason)


def check_request_id(request_id: str) -> None:
    """Check the text by which a request is known when it is sent again.

    Raises:
        ServiceError: `INVALID_ARGUMENT`.
    """
    if len(request_id) > _MAX_REQUEST_ID_CHARACTERS:
        raise invalid("request_id", f"over {_MAX_REQUEST_ID_CHARACTERS} characters")


def check_batch(field: str, size: int, limits: Limits) -> None:
    """Check the number of samples.

    Raises:
        ServiceError: `EMPTY_BATCH` or `REQUEST_TOO_LARGE`, with the field named.
    """
    if size == 0:
        raise invalid(field, "the batch is empty; send at least one sample", ErrorReason.EMPTY_BATCH)
    if size > limits.max_batch:
        raise invalid(
            field,
            f"{size} samples, the limit is {limits.max_batch}; send a smaller batch",
            ErrorReason.REQUEST_TOO_LARGE,
        )
