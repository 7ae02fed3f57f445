"""What can go wrong, as domain errors: one class for all, told apart by its reason.

Code below `rpc` raises `ServiceError` and knows nothing of gRPC; `rpc.status` maps the reason to a
status code. A message says what to do next and names no path of the machine.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches

from trocar_api.reasons import ErrorReason

_FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s/:'\"]+/)+")


class ServiceError(Exception):
    """A call failed for a reason that its caller can act on.

        raise ServiceError(ErrorReason.UNKNOWN_MODEL, "no model 'resnt18'; nearest: resnet18")

    Args:
        reason: The stable reason that the client sees.
        message: One sentence or a few for a person, with what to do next.
        details: Extra facts as text, sent as `ErrorInfo.metadata`.

    Attributes:
        retry_after_s: In how many seconds the same call may succeed, where that is known; see `busy`.
    """

    retry_after_s: float | None = None

    def __init__(self, reason: ErrorReason, message: str, **details: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.details = details


def busy(message: str, retry_after_s: float | None = None, **details: str) -> ServiceError:
    """Build the error for a server that cannot take a call now, and may soon.

    Args:
        message: What there is too much of, and what to do next.
        retry_after_s: In how many seconds the same call may succeed; None where nobody knows.
        details: Extra facts as text.
    """
    error = ServiceError(ErrorReason.SERVER_BUSY, message, **details)
    error.retry_after_s = retry_after_s
    return error


def nearest(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Return up to `count` of `names` that look like `name`, best first; those of its depth come first."""
    candidates = list(names)
    level = [candidate for candidate in candidates if candidate.count(".") == name.count(".")]
    found = [*get_close_matches(name, level, count, 0.5), *get_close_matches(name, candidates, count, 0.5)]
    return list(dict.fromkeys(found))[:count]


def unknown(reason: ErrorReason, kind: str, name: str, names: Iterable[str], advice: str) -> ServiceError:
    """Build the error for a name that does not exist: the nearest ones, or else the advice."""
    hints = nearest(name, names)
    rest = f"nearest: {', '.join(hints)}" if hints else advice
    return ServiceError(reason, f"no {kind} '{name}'; {rest}", nearest=", ".join(hints))


def first_line(error: BaseException | None) -> str:
    """Return what an error says, in one line and without the folders of this machine."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return _FOLDERS.sub("", lines[0])[:300]
