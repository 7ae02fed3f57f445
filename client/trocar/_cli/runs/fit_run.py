"""Run of a fit on the command line: display and saved results."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import typer

from trocar import Client
from trocar._base.tables import size_text
from trocar._cli.console import number_text
from trocar._cli.failures import refuse
from trocar._cli.runs.uploading import bars
from trocar._result.fit_progress import summary
from trocar._result.history import FitEvent, History, failure
from trocar.errors import TrocarError
from trocar.training import Trainer
from trocar_api.stored_names import is_stored_name

STOPPED = 130
"""What a shell returns for a command that Ctrl-C ended."""


@dataclass(frozen=True)
class Results:
    """Saved results of a fit."""

    publish: str | None = None
    """The id of a new model."""
    export: Path | None = None
    """A file for the weights."""
    history: Path | None = None
    """A file for the events."""
    as_json: bool = False
    """Whether the result is printed as JSON, so that everything else goes to standard error."""

    @property
    def has_weights(self) -> bool:
        """Whether the weights are saved anywhere."""
        return self.publish is not None or self.export is not None

    def say(self, line: str) -> None:
        """Print a line that stays on the screen."""
        typer.echo(line, err=self.as_json)

    def check(self, client: Client) -> None:
        """Check early for errors that would occur after hours.

        Raises:
            typer.BadParameter: The id is invalid or taken, or a folder does not exist.
        """
        for option, path in (("--export", self.export), ("--history", self.history)):
            if path is not None and not path.absolute().parent.is_dir():
                refuse(f"{option}: no folder {str(path.parent)!r}")
        if self.publish is None:
            return
        if not is_stored_name(self.publish):
            refuse(
                f"--publish: {self.publish!r} is not a valid id; use 1 to 63 lower-case letters, digits "
                "and ._-"
            )
        if self.publish in {model.model_id for model in client.models()}:
            refuse(f"--publish: model {self.publish!r} exists; choose another id")

    def save(self, history: History) -> None:
        """Write the events."""
        if self.history is not None:
            history.save(self.history)
            self.say(f"wrote {self.history}")

    def keep(self, trainer: Trainer, categories: tuple[str, ...]) -> None:
        """Export and publish."""
        with _noted(trainer):
            if self.export is not None:
                path = trainer.export(self.export)
                self.say(f"wrote {path} ({size_text(path.stat().st_size)})")
            if self.publish is not None:
                self.say(f"published {trainer.publish(self.publish, categories=categories)}")


@contextmanager
def allowed_values() -> Iterator[None]:
    """Convert errors of the client's checks to errors of the command line."""
    try:
        yield
    except (TypeError, ValueError) as error:
        refuse(str(error))


@contextmanager
def closed_unless_begun(trainer: Trainer) -> Iterator[None]:
    """Close a trainer if its fit does not begin."""
    try:
        yield
    except BaseException:
        with suppress(TrocarError):  # the original error says more
            trainer.close()
        raise


def follow(trainer: Trainer, first: int | None, results: Results) -> History:
    """Show a fit to its end.

    Raises:
        typer.Exit: Ctrl-C: the fit continues.
        TrocarError: The fit failed, or the server is gone; the message says how to reach the trainer.
    """
    history = History()
    try:
        with _noted(trainer), bars() as shown:
            for event in trainer.watch(first):
                history.add(event)
                shown.show(event)
                tell(event, results)
            if history.outcome == "failed":
                raise failure(history[-1])
    except KeyboardInterrupt:
        _leave(trainer)
    finally:
        results.save(history)
    if history.evaluations:
        last = history.evaluations[-1]
        results.say(f"at the end: {summary(last)}, on {last['sample_count']:,} samples")
    return history


def tell(event: FitEvent, results: Results) -> None:
    """Print the line of an event, if it has one."""
    if event.kind == "evaluation":
        results.say(f"epoch {event['epoch'] + 1}: {summary(event)}")
    elif event.kind == "epoch" and event.get("loss") is not None:
        results.say(f"epoch {event['epoch'] + 1}: loss {number_text(float(event['loss']))}")
    elif event.get("message") and event.kind != "failed":
        typer.echo(str(event["message"]), err=True)


def _leave(trainer: Trainer) -> NoReturn:
    name = trainer.trainer_id
    typer.echo(
        f"\nthe fit of trainer {name} continues on the server; `trocar trainers watch {name}` shows it, "
        "`trocar "
        f"trainers cancel {name}` ends it",
        err=True,
    )
    raise typer.Exit(STOPPED)


@contextmanager
def _noted(trainer: Trainer) -> Iterator[None]:
    """Add a note to an error: the trainer still exists."""
    try:
        yield
    except (TrocarError, OSError) as error:
        error.add_note(f"trainer {trainer.trainer_id} stays on the server; see `trocar trainers --help`")
        raise
