"""What can go wrong with tensors on disk: domain errors that come out of forward or backward."""

import errno


class SpoolError(RuntimeError):
    """Saved tensors could not be kept or brought back; the message names the cause. The next step works."""


class SpoolFullError(SpoolError):
    """There is no room: the disk is full, or the quota is used up."""


class SpoolReadError(SpoolError):
    """A file is shorter than it was, altered, or cannot be read."""


class SavedTensorChangedError(SpoolError):
    """A tensor that the backward pass needs was changed in place after it was saved."""


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_error(error: BaseException) -> SpoolError:
    """Return the domain error for one that stopped a write."""
    return _named(error, "cannot write saved tensors", SpoolError)


def read_error(error: BaseException) -> SpoolError:
    """Return the domain error for one that stopped a read."""
    return _named(error, "cannot read saved tensors", SpoolReadError)


def _named(error: BaseException, what: str, kind: type[SpoolError]) -> SpoolError:
    if isinstance(error, SpoolError):
        return error
    if isinstance(error, OSError):
        kind = SpoolFullError if error.errno in _NO_ROOM else kind
        named = kind(f"{what}: {error.strerror or error}")
    else:
        named = kind(f"{what}: {type(error).__name__}: {error}")
    named.__cause__ = error.with_traceback(None)  # which would hold the tensor that was being written
    return named
