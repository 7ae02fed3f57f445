"""Domain errors: one exception class, with a stable reason.

Code below `rpc` raises `ServiceError` and knows nothing of gRPC; `rpc.call.status` maps the reason to a
status code. A message says what to do next and names no path of the machine.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches

from trocar_api.reasons import ErrorReason

TRAINER_MOVED = "trainer_moved"
"""Detail of the error for a trainer that another replica of the cluster has, or is taking over."""

_FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s/:'\"]+/)+")


class ServiceError(Exception):
    """Failure of a call, with a reason that its caller can act on.

        raise ServiceError(ErrorReason.UNKNOWN_MODEL, "no model 'resnt18'; nearest: resnet18")

    Args:
        reason: The stable reason that the client sees.
        message: One sentence or a few for a person, with what to do next.
        details: Extra facts as text, sent as `ErrorInfo.metadata`.

    Attributes:
        retry_after_s: Seconds after which the same call may succeed, if known; see `busy`.
    """

    retry_after_s: float | None = None

    def __init__(self, reason: ErrorReason, message: str, **details: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.details = details


def busy(message: str, retry_after_s: float | None = None, **details: str) -> ServiceError:
    """Error for a server that is temporarily too busy for a call.

    Args:
        message: The exhausted resource, and what to do next.
        retry_after_s: Seconds after which the same call may succeed; None if unknown.
        details: Extra facts as text.
    """
    error = ServiceError(ErrorReason.SERVER_BUSY, message, **details)
    error.retry_after_s = retry_after_s
    return error


def nearest(name: str, names: Iterable[str], count: int = 3) -> list[str]:
    """Return up to `count` of `names` that look like `name`, best first; names of its depth come first.

    Names that differ in case only, or in what stands before a dot (`model.layer4` of `layer4`), come alone.
    """
    candidates = list(names)
    same = [candidate for candidate in candidates if _is_same(name.lower(), candidate.lower())]
    if same:
        return sorted(same, key=len)[:count]
    level = [candidate for candidate in candidates if candidate.count(".") == name.count(".")]
    result = [*get_close_matches(name, level, count, 0.5), *get_close_matches(name, candidates, count, 0.5)]
    return list(dict.fromkeys(result))[:count]


def _is_same(name: str, candidate: str) -> bool:
    """Whether one is the other with names before it, as in `model.layer4` and `layer4`."""
    return bool(name and candidate) and (
        name == candidate or name.endswith(f".{candidate}") or candidate.endswith(f".{name}")
    )


def unknown(reason: ErrorReason, kind: str, name: str, names: Iterable[str], advice: str) -> ServiceError:
    """Error for a name that does not exist, with the nearest names, or else the advice."""
    hints = nearest(name, names)
    rest = f"nearest: {', '.join(hints)}" if hints else advice
    return ServiceError(reason, f"no {kind} '{name}'; {rest}", nearest=", ".join(hints))


def first_line(error: BaseException | None) -> str:
    """Message of an error, on one line and without the folders of this machine."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return _FOLDERS.sub("", lines[0])[:300]
