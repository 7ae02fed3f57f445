"""Inputs of commands that run one pass."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trocar import Client
from trocar._cli.failures import refuse
from trocar._cli.options.input_sets import read_set
from trocar._cli.options.samples import is_one_batch


def read_pass(client: Client, model_id: str, sources: Sequence[str | Path]) -> list[Any]:
    """Return the inputs of `Client.extract` for all samples of files and folders, as one batch.

    Raises:
        TrocarError: There are arrays, and the model is unknown or not loaded.
        typer.BadParameter: There are images and arrays of the model's input, or an error of `read_set`.
    """
    samples = read_set(client, model_id, sources)
    if not is_one_batch(samples, len(samples)):
        refuse("images and arrays of the model's own input cannot be mixed in one pass; run them separately")
    return [sample.value for sample in samples]
