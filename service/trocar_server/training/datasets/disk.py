"""What the disk says, as errors that a caller can act on."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_log = structlog.get_logger("trocar")


@contextmanager
def disk_errors() -> Iterator[None]:
    """Turn errors of the disk into `STORAGE_FULL` and `STORAGE_UNAVAILABLE`.

    Raises:
        ServiceError: One of these.
    """
    try:
        yield
    except OSError as error:
        why = error.strerror or type(error).__name__
        _log.warning("stored data sets are out of reach", problem=why)
        if error.errno in _FULL:
            raise ServiceError(
                ErrorReason.STORAGE_FULL,
                "the server's disk is full and nothing was stored; delete data sets that are no longer "
                "needed, or ask the operator to make room",
            ) from None
        raise ServiceError(
            ErrorReason.STORAGE_UNAVAILABLE,
            f"the server cannot reach its data sets ({why}); its operator has to see to that",
        ) from None
