"""Outcome of `trocar train`: where the result is, and the commands that use it."""

import shlex
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import typer

from trocar._cli.console import show_json
from trocar._cli.failures import FAILED
from trocar._cli.options.connection_options import connection_code, connection_words
from trocar._cli.runs.fit_run import Results
from trocar._result.history import History
from trocar._wire.stored_datasets import StoredDataset
from trocar.training import Trainer

_LONGEST_ID = 63


def uses_of(
    trainer: Trainer, dataset: StoredDataset, epochs: int, batch: int, *, has_categories: bool
) -> dict[str, str]:
    """Return the commands that publish, export, continue and close a trainer, by these words.

    Args:
        trainer: The trainer.
        dataset: The data that it was trained on.
        epochs: Its epochs.
        batch: Samples of a batch.
        has_categories: Whether the data set names the classes of the new head.
    """
    own, base = trainer.trainer_id, trainer.info().model_id
    suffix = "-tuned"
    classes = ["--classes-of", dataset.dataset_id] if has_categories else []
    fit = f"c.trainer({own!r}).fit(c.dataset({dataset.dataset_id!r}), epochs={epochs}, batch_size={batch})"
    to_server = connection_words()
    return {
        "publish": shlex.join(
            [
                "trocar",
                "trainers",
                "publish",
                own,
                base[: _LONGEST_ID - len(suffix)] + suffix,
                *classes,
                *to_server,
            ]
        ),
        "export": shlex.join(
            ["trocar", "trainers", "export", own, f"{base}{suffix}.safetensors", *to_server]
        ),
        "continue": shlex.join(["python", "-c", f"import trocar; c = {connection_code()}; {fit}"]),
        "close": shlex.join(["trocar", "trainers", "close", own, *to_server]),
    }


def end(trainer: Trainer, history: History, results: Results, uses: Mapping[str, str]) -> None:
    """Say where the result is; close the trainer where nothing uses it any more.

    Args:
        trainer: The trainer.
        history: Its fit.
        results: What was saved, if the fit has finished.
        uses: Commands that use the trainer; empty if it is to be closed after a fit that has finished.

    Raises:
        typer.Exit: The fit did not finish; the trainer stays.
    """
    has_finished = history.outcome == "finished"
    expires_at = trainer.info().expires_at if uses or not has_finished else None
    if not has_finished:
        results.say(f"nothing was published or exported; trainer {trainer.trainer_id}")
    elif expires_at is None:
        trainer.close()
    else:
        for line in _kept_lines(trainer.trainer_id, expires_at, uses):
            results.say(line)
    if results.as_json:
        saved = results if has_finished else Results(history=results.history)
        show_json(_described(trainer, history, saved, expires_at, uses))
    if not has_finished:
        raise typer.Exit(FAILED)


def _described(
    trainer: Trainer,
    history: History,
    results: Results,
    expires_at: datetime | None,
    uses: Mapping[str, str],
) -> dict[str, Any]:
    evaluation = history.evaluations[-1] if history.evaluations else None
    paths = {"exported": results.export, "history": results.history}
    return {
        "outcome": history.outcome,
        "evaluation": None if evaluation is None else dict(evaluation.facts),
        "published": results.publish,
        **{name: None if path is None else str(path) for name, path in paths.items()},
        "trainer_id": None if expires_at is None else trainer.trainer_id,
        "expires_at": None if expires_at is None else expires_at.isoformat(),
        "commands": dict(uses),
    }


def _kept_lines(trainer_id: str, expires_at: datetime, uses: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines about a trainer that stays on the server."""
    until = f"{expires_at:%Y-%m-%d %H:%M} UTC"
    yield f"trainer {trainer_id} stays on the server until {until}, longer if it is used:"
    width = 1 + max(map(len, uses))
    for name, command in uses.items():
        yield f"  {name + ':':{width}} {command}"
