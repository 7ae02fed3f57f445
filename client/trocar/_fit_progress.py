"""A bar for a fit: tqdm's where it is installed, which notebooks show well, or else rich's."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any, Self

    from trocar._history import FitEvent


class FitProgress(Protocol):
    """Shows the events of a fit."""

    def __enter__(self) -> Self:
        """Begin."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End."""
        ...

    def show(self, event: FitEvent) -> None:
        """Show an event."""
        ...


def make_progress(is_wanted: bool) -> FitProgress:
    """Return a bar, or something that shows nothing: where none is wanted, and where nobody would see it."""
    if not is_wanted or not (sys.stderr.isatty() or _in_notebook()):
        return _Silent()
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return _RichBar()
    return _TqdmBar(tqdm)


def summary(event: FitEvent) -> str:
    """Return what an event tells in a few words; empty where it tells nothing for people."""
    if event.kind == "step":
        return f"loss {event['loss']:.4f}"
    if event.kind == "evaluation":
        metrics = event.get("metrics") or {}
        numbers = [f"{name} {value:.4f}" for name, value in metrics.items() if isinstance(value, int | float)]
        loss = event.get("loss")
        return ", ".join([*([] if loss is None else [f"eval loss {loss:.4f}"]), *numbers])
    return str(event.get("message") or "")


class _Silent:
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, event: FitEvent) -> None:
        pass


class _TqdmBar:
    def __init__(self, tqdm: Any) -> None:
        self._bar = tqdm(unit="step", leave=True)
        self._evaluated = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, event: FitEvent) -> None:
        if event.get("total_steps"):
            self._bar.total = event["total_steps"]
        if event.kind == "evaluation":
            self._evaluated = summary(event)
        if event.kind == "step":
            self._bar.n = event["step"]
            self._bar.set_postfix_str(
                "  ".join(filter(None, (summary(event), self._evaluated))), refresh=False
            )
            self._bar.update(0)
        else:
            self._bar.refresh()


class _RichBar:
    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("fit"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("", total=None)
        self._evaluated = ""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, event: FitEvent) -> None:
        if event.get("total_steps"):
            self._progress.update(self._task, total=event["total_steps"])
        if event.kind == "evaluation":
            self._evaluated = summary(event)
        if event.kind == "step":
            text = "  ".join(filter(None, (summary(event), self._evaluated)))
            self._progress.update(self._task, completed=event["step"], description=text)


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    return shell is not None and type(shell.get_ipython()).__name__ == "ZMQInteractiveShell"
