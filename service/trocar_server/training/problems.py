"""Collecting everything that is wrong, so that one error tells it all.

problems = Problems()
problems.add("optimizer.options.momentum", "must be a number")
problems.raise_any(ErrorReason.TRAINER_INVALID, "no such trainer can be made")
"""

from collections.abc import Iterator
from contextlib import contextmanager

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError

_SHOWN_COUNT = 20


class Problems:
    """What is wrong with a description, each with the field that it is in.

    Attributes:
        lines: The problems, as they are shown.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._seen: set[str] = set()

    def add(self, field: str, message: str) -> None:
        """Note a problem, its first line; what names its field itself gets no second name."""
        message = message.partition("\n")[0]
        line = message if not field or message.startswith(field) else f"{field}: {message}"
        if line not in self._seen:
            self._seen.add(line)
            self.lines.append(line)

    @contextmanager
    def noting(self, field: str) -> Iterator[None]:
        """Note the `ServiceError` that is raised inside the context, and go on behind it."""
        try:
            yield
        except ServiceError as error:
            self.add(field, error.message)

    def raise_any(self, reason: ErrorReason, what: str) -> None:
        """Raise all of them as one error, if there are any.

        Raises:
            ServiceError: Of this reason; the detail `problems` has one problem a line.
        """
        if self.lines:
            raise self.error(reason, what)

    def error(self, reason: ErrorReason, what: str) -> ServiceError:
        """Build the error that tells all of them; there is one at least."""
        shown = self.lines[:_SHOWN_COUNT]
        count = len(self.lines)
        listed = "; ".join(f"({i}) {line}" for i, line in enumerate(shown, 1)) if count > 1 else shown[0]
        more = f"; and {count - _SHOWN_COUNT} more" if count > _SHOWN_COUNT else ""
        head = f"{what}: {count} problems" if count > 1 else what
        return ServiceError(reason, f"{head}: {listed}{more}", problems="\n".join(shown))
