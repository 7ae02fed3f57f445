"""Progress bars of rich for a fit and its uploads, for the command line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from trocar._result.fit_progress import FitText, upload_state

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from trocar._result.history import FitEvent
    from trocar._uploads.upload_plan import UploadProgress


class RichProgress:
    """Bars on stderr, one below the other.

    Args:
        console: Where; stderr when None.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[says]}", markup=False),
            console=console or Console(stderr=True),
            redirect_stdout=sys.stdout.isatty(),  # output to a file must not appear on the terminal
        )
        self._shows = ""
        self._task: TaskID | None = None
        self._text = FitText()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show_upload(self, progress: UploadProgress) -> None:
        """Show the progress of an upload."""
        does, done, total = upload_state(progress)
        self._update(does, completed=done, total=total)

    def show(self, event: FitEvent) -> None:
        """Show an event."""
        self._update("fit", completed=event.get("step"), total=event.get("total_steps"))
        if event.kind in ("step", "evaluation"):
            self._update("fit", says=self._text.of(event))

    def _update(
        self,
        shows: str,
        *,
        completed: float | None = None,
        total: float | None = None,
        says: str | None = None,
    ) -> None:
        if self._task is None or self._shows != shows:
            if self._task is not None and self._shows != "fit":
                self._progress.remove_task(self._task)
            self._shows, self._task = shows, self._progress.add_task(shows, total=total, says="")
        self._progress.update(self._task, completed=completed, total=total)
        if says is not None:
            self._progress.update(self._task, says=says)
