"""Disk errors, as domain errors that a caller can act on.

with disk_errors("checkpoint"):
    write_durably(folder / "7.json", content)
"""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.storage.durable import is_disk_full

_log = structlog.get_logger("trocar")


@contextmanager
def disk_errors(subject: str, reason: ErrorReason | None = None) -> Iterator[None]:
    """Convert disk errors to domain errors.

    Args:
        subject: What is being read or written, for the message: "checkpoint".
        reason: Reason of every error; `STORAGE_FULL` or `STORAGE_UNAVAILABLE` when None.

    Raises:
        ServiceError: Of that reason.
    """
    try:
        yield
    except OSError as error:
        raise storage_error(subject, error, reason) from error


def storage_error(subject: str, error: OSError, reason: ErrorReason | None = None) -> ServiceError:
    """Log a disk error and return the caller's error, which names no path."""
    problem = error.strerror or type(error).__name__
    _log.warning("the disk failed", what=subject, problem=problem)
    if is_disk_full(error):
        return ServiceError(
            reason or ErrorReason.STORAGE_FULL,
            f"the server's disk is full, the {subject} was not written; delete something or have its "
            "operator make room",
        )
    return ServiceError(
        reason or ErrorReason.STORAGE_UNAVAILABLE,
        f"the server's disk failed at the {subject} ({problem}); ask its operator to check the disk",
    )
