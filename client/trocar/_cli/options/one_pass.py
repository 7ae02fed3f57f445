"""Inputs of commands that run one pass."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from trocar import Client
from trocar._cli.failures import refuse
from trocar._cli.options.input_sets import read_set
from trocar._cli.options.samples import is_one_batch
from trocar._request.texts import texts

EditSources = Annotated[
    list[str] | None,
    typer.Option(
        "--edit-source",
        metavar="NAME=FILE",
        help="Another input, from which 'swap source=NAME' takes values; repeat for more.",
    ),
]
EditSourceTexts = Annotated[
    list[str] | None,
    typer.Option("--edit-source-text", metavar="NAME=TEXT", help="The same with a text."),
]


def read_pass(
    client: Client, model_id: str, sources: Sequence[str | Path], limit: int | None = None
) -> list[Any]:
    """Return the inputs of `Client.extract` for the samples of files and folders, as one batch.

    Args:
        client: Client for the model's input.
        model_id: The model.
        sources: The files and folders.
        limit: The most samples, the first ones; all when None.

    Raises:
        TrocarError: There are arrays, and the model is unknown or not loaded.
        typer.BadParameter: There are images and arrays of the model's input, or an error of `read_set`.
    """
    samples = read_set(client, model_id, sources)[:limit]
    if not is_one_batch(samples, len(samples)):
        refuse("images and arrays of the model's own input cannot be mixed in one pass; run them separately")
    return [sample.value for sample in samples]


def read_edit_sources(
    client: Client, model_id: str, files: Sequence[str] | None, sentences: Sequence[str] | None
) -> dict[str, Any]:
    """Return the `sources` of `Client.extract`; entries of one name are one batch, in order.

    Raises:
        TrocarError: There are arrays, and the model is unknown or not loaded.
        typer.BadParameter: An entry is not NAME=FILE, a name has files and texts, or an error of `read_pass`.
    """
    named_files = _by_name("--edit-source", "FILE", files)
    named_texts = _by_name("--edit-source-text", "TEXT", sentences)
    both = next((name for name in named_files if name in named_texts), None)
    if both is not None:
        refuse(f"--edit-source: {both!r} has files and texts; an input has one kind")
    return {
        **{name: read_pass(client, model_id, paths) for name, paths in named_files.items()},
        **{name: texts(entries) for name, entries in named_texts.items()},
    }


def _by_name(option: str, what: str, entries: Sequence[str] | None) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for entry in entries or ():
        name, _, given = entry.partition("=")
        if not name.strip() or not given.strip():
            refuse(f"{option}: {entry!r} is not NAME={what}")
        result.setdefault(name.strip(), []).append(given)
    return result
