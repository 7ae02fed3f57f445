"""Problem list: collects all validation errors into one.

problems = Problems()
problems.add("optimizer.options.momentum", "must be a number")
problems.raise_any(ErrorReason.TRAINER_INVALID, "the trainer's specification is invalid")
"""

from collections.abc import Iterator
from contextlib import contextmanager

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

_SHOWN_COUNT = 20


class Problems:
    """Problems of a spec, each with its field.

    Attributes:
        lines: The problems, as shown.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._seen: set[str] = set()

    def add(self, field: str, message: str) -> None:
        """Add a problem, its first line only; the field is not repeated if the message names it."""
        message = message.partition("\n")[0]
        line = message if not field or message.startswith(field) else f"{field}: {message}"
        if line not in self._seen:
            self._seen.add(line)
            self.lines.append(line)

    @contextmanager
    def noting(self, field: str) -> Iterator[None]:
        """Suppress a `ServiceError` inside the context and add it as a problem."""
        try:
            yield
        except ServiceError as error:
            self.add(field, error.message)

    def raise_any(self, reason: ErrorReason, what: str) -> None:
        """Raise all problems as one error, if there are any.

        Raises:
            ServiceError: With this reason; the detail `problems` has one problem per line.
        """
        if self.lines:
            raise self.error(reason, what)

    def error(self, reason: ErrorReason, what: str) -> ServiceError:
        """Build the error that lists all problems; there is at least one."""
        shown = self.lines[:_SHOWN_COUNT]
        count = len(self.lines)
        listed = "; ".join(f"({i}) {line}" for i, line in enumerate(shown, 1)) if count > 1 else shown[0]
        more = f"; and {count - _SHOWN_COUNT} more" if count > _SHOWN_COUNT else ""
        head = f"{what}: {count} problems" if count > 1 else what
        return ServiceError(reason, f"{head}: {listed}{more}", problems="\n".join(shown))
