"""Progress bars for a fit and its uploads: tqdm's, which notebooks display well, or else rich's."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any, Self

    from trocar._result.history import FitEvent
    from trocar._uploads.upload_plan import UploadProgress


class FitProgress(Protocol):
    """Shows uploads and the events of a fit."""

    def __enter__(self) -> Self:
        """Begin."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End."""
        ...

    def show_upload(self, progress: UploadProgress) -> None:
        """Show the progress of an upload; may be called from any thread."""
        ...

    def show(self, event: FitEvent) -> None:
        """Show an event."""
        ...


def make_progress(is_wanted: bool) -> FitProgress:
    """Return progress bars, or a silent one if none is requested or stderr is no terminal or notebook."""
    if not is_wanted or not (sys.stderr.isatty() or _in_notebook()):
        return SilentProgress()
    try:
        from tqdm.auto import tqdm
    except ImportError:
        from trocar._result.fit_progress_rich import RichProgress

        return RichProgress()
    return TqdmProgress(tqdm)


class FitText:
    """Text of a bar: the loss, and the last evaluation."""

    def __init__(self) -> None:
        self._evaluated = ""

    def of(self, event: FitEvent) -> str:
        """Add an event, and return the new text."""
        if event.kind == "evaluation":
            self._evaluated = summary(event)
            return self._evaluated
        return "  ".join(filter(None, (summary(event), self._evaluated)))


def summary(event: FitEvent) -> str:
    """Return a short summary of an event; empty if there is nothing to show."""
    if event.kind == "step":
        return f"loss {event['loss']:.4f}"
    if event.kind == "evaluation":
        metrics = event.get("metrics") or {}
        numbers = [f"{name} {value:.4f}" for name, value in metrics.items() if isinstance(value, int | float)]
        loss = event.get("loss")
        return ", ".join([*([] if loss is None else [f"eval loss {loss:.4f}"]), *numbers])
    return str(event.get("message") or "")


def upload_state(progress: UploadProgress) -> tuple[str, int, int]:
    """Return the phase of an upload, its progress and its total: samples, then bytes."""
    if progress.byte_count:
        return "sending", progress.sent_bytes, progress.missing_bytes
    return "reading", progress.read_count, progress.sample_count


class SilentProgress:
    """Shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def show_upload(self, progress: UploadProgress) -> None:
        """Do nothing."""

    def show(self, event: FitEvent) -> None:
        """Do nothing."""


class TqdmProgress:
    """Bars of tqdm.

    Args:
        tqdm: Makes one.
    """

    def __init__(self, tqdm: Any) -> None:
        self._tqdm = tqdm
        self._bar: Any = None
        self._shows = ""
        self._text = FitText()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end_bar()

    def show_upload(self, progress: UploadProgress) -> None:
        """Show the progress of an upload."""
        does, done, total = upload_state(progress)
        unit = "B" if does == "sending" else "sample"
        bar = self._bar_for(does, total=total, unit=unit, unit_scale=True, leave=False)
        bar.total = total
        bar.update(done - bar.n)

    def show(self, event: FitEvent) -> None:
        """Show an event."""
        bar = self._bar_for("fit", total=event.get("total_steps"), unit="step", leave=True)
        bar.total = event.get("total_steps") or bar.total
        if event.kind in ("step", "evaluation"):
            bar.set_postfix_str(self._text.of(event), refresh=False)
        bar.update(event.get("step", bar.n) - bar.n)
        if event.kind != "step":
            bar.refresh()

    def _bar_for(self, shows: str, **options: Any) -> Any:
        if self._shows != shows:
            self._end_bar()
            self._shows, self._bar = shows, self._tqdm(desc=shows, **options)
        return self._bar

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._shows, self._bar = "", None


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    return shell is not None and type(shell.get_ipython()).__name__ == "ZMQInteractiveShell"
