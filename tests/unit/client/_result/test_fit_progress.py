"""Bars of a fit: tqdm's, rich's, or none; on terminals that tests make up."""

import builtins
import io
import sys
from functools import partial
from typing import Any

import pytest
from rich.console import Console
from tqdm.auto import tqdm

from trocar._result.fit_progress import SilentProgress, TqdmProgress, make_progress
from trocar._result.fit_progress_rich import RichProgress
from trocar._uploads.upload_plan import UploadProgress
from trocar.training import FitEvent


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


EVENTS = [
    FitEvent(0, "started", 0.0, {"step": 0, "epoch": 0, "total_steps": 4}),
    FitEvent(1, "cache", 0.0, {"step": 0, "epoch": 0, "done": 3, "total": 9}),
    FitEvent(2, "step", 0.0, {"step": 1, "epoch": 0, "loss": 2}),
    FitEvent(3, "step", 0.0, {"step": 2, "epoch": 0, "loss": float("nan"), "is_skipped": True}),
    FitEvent(4, "epoch", 0.0, {"step": 2, "epoch": 0, "loss": 1.5}),
    FitEvent(
        5, "evaluation", 0.0, {"step": 2, "epoch": 0, "loss": 1.5, "metrics": {"accuracy": 0.75, "f1": [1]}}
    ),
    FitEvent(6, "step", 0.0, {"step": 3, "epoch": 1, "loss": 0.25}),
    FitEvent(7, "checkpoint", 0.0, {"step": 3, "epoch": 1, "checkpoint": 1}),
    FitEvent(8, "cancelled", 0.0, {"step": 3, "epoch": 1, "message": "[bold]the fit was cancelled"}),
]
UPLOAD = [
    UploadProgress(0, 10),
    UploadProgress(10, 10),
    UploadProgress(10, 10, 0, 2_000_000, 3_000_000),
    UploadProgress(10, 10, 2_000_000, 2_000_000, 3_000_000),
]


def seen_on_stderr(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make stderr a terminal; not in a fixture, as pytest puts its own there for every phase."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    return made


def test_nothing_is_shown_where_nobody_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(make_progress(True), SilentProgress)


def test_nothing_is_shown_where_nobody_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = seen_on_stderr(monkeypatch)
    bar = make_progress(False)
    with bar:
        show_everything(bar)
    assert terminal.getvalue() == ""


def test_tqdm_shows_the_bar_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = seen_on_stderr(monkeypatch)
    assert isinstance(make_progress(True), TqdmProgress)
    with TqdmProgress(partial(tqdm, mininterval=0, miniters=0, ncols=120)) as bar:
        show_everything(bar)
    lines = terminal.getvalue().replace("\r", "\n")
    assert "reading" in lines
    assert "sending: 100%" in lines
    assert "2.00M/2.00M" in lines
    assert "loss nan" in lines or "loss 0.2500" in lines
    assert "3/4" in lines
    assert "eval loss 1.5000, accuracy 0.7500" in lines


def test_rich_shows_the_bar_where_tqdm_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = seen_on_stderr(monkeypatch)
    original = builtins.__import__

    def without_tqdm(name: str, *arguments: Any, **options: Any) -> Any:
        if name.startswith("tqdm"):
            raise ImportError(name)
        return original(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_tqdm)
    bar = make_progress(True)
    assert isinstance(bar, RichProgress)
    with bar:
        show_everything(bar)
    assert "fit" in terminal.getvalue()


def test_richs_bar_says_what_the_last_evaluation_gave() -> None:
    screen = Terminal()
    with RichProgress(Console(file=screen, width=120, force_terminal=True)) as bar:
        show_everything(bar)
    last = screen.getvalue().rsplit("\x1b[2K", 1)[-1]
    assert "fit" in last
    assert "75%" in last
    assert "loss 0.2500  eval loss 1.5000, accuracy 0.7500" in last
    assert "reading" not in last


def test_a_fit_of_several_epochs_has_one_bar() -> None:
    screen = Terminal()
    with RichProgress(Console(file=screen, width=80, force_terminal=True)) as bar:
        show_everything(bar)
        assert [task.description for task in bar._progress.tasks] == ["fit"]
    assert "accuracy 0.7500" in screen.getvalue().rsplit("\x1b[2K", 1)[-1]


def test_what_is_printed_beside_richs_bar_stays_where_it_goes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with RichProgress(Console(file=Terminal(), width=80, force_terminal=True)) as bar:
        bar.show(EVENTS[0])
        print("a line for a file")
    assert capsys.readouterr().out == "a line for a file\n"


def test_a_bar_is_closed_when_the_fit_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = seen_on_stderr(monkeypatch)
    bar = make_progress(True)

    def fail() -> None:
        with bar:
            bar.show(EVENTS[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert terminal.getvalue().endswith("\n")


def test_a_fit_that_is_joined_in_its_middle_has_no_total(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = seen_on_stderr(monkeypatch)
    with make_progress(True) as bar:
        bar.show(EVENTS[6])
    assert "3step" in terminal.getvalue()


def test_notebooks_get_a_bar_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class ZMQInteractiveShell:
        pass

    class IPython:
        @staticmethod
        def get_ipython() -> ZMQInteractiveShell:
            return ZMQInteractiveShell()

    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setitem(sys.modules, "IPython", IPython)
    assert isinstance(make_progress(True), TqdmProgress)


def show_everything(bar: Any) -> None:
    for progress in UPLOAD:
        bar.show_upload(progress)
    for shown in EVENTS:
        bar.show(shown)
