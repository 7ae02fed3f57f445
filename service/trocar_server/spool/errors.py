"""What can go wrong with tensors on disk: the reasons, as domain errors that come out of forward or backward."""


class SpoolError(RuntimeError):
    """Saved tensors could not be kept or brought back; the message names the cause. The next step works."""


class SpoolFullError(SpoolError):
    """There is no room: the disk is full, or the quota is used up."""


class SpoolReadError(SpoolError):
    """A file is shorter than it was, altered, or cannot be read."""


class SavedTensorChangedError(SpoolError):
    """A tensor that the backward pass needs was changed in place after it was saved."""
