"""Spool errors: domain errors of tensors on disk, raised from forward or backward."""

from trocar_server.storage.durable import is_disk_full


class SpoolError(RuntimeError):
    """Saved tensors could not be kept or brought back; the message names the cause. The next step works."""


class SpoolFullError(SpoolError):
    """There is no room: the disk is full, or the quota is used up."""


class SpoolReadError(SpoolError):
    """A file is shorter than it was, altered, or cannot be read."""


class SavedTensorChangedError(SpoolError):
    """A tensor that the backward pass needs was changed in place after it was saved."""


class CodecError(SpoolError):
    """A codec's `unpack` did not return a tensor like the one that its `pack` was given."""


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
        kind = SpoolFullError if is_disk_full(error) else kind
        named = kind(f"{what}: {error.strerror or error}")
    else:
        named = kind(f"{what}: {type(error).__name__}: {error}")
    named.__cause__ = error.with_traceback(None)  # which would hold the tensor that was being written
    return named
