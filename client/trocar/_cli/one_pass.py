"""The inputs of commands that run one pass."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trocar import Client
from trocar._cli.failures import refuse
from trocar._cli.input_sets import read_set
from trocar._cli.samples import is_one_batch


def read_pass(client: Client, model_id: str, paths: Sequence[Path]) -> list[Any]:
    """Return what `Client.extract` takes for all samples of files and folders, as one batch.

    Raises:
        TrocarError: There are arrays, and the model is unknown or not loaded.
        typer.BadParameter: There are images and arrays of the model's input, or what `read_set` refuses.
    """
    samples = read_set(client, model_id, paths)
    if not is_one_batch(samples, len(samples)):
        refuse("images and arrays of the model's own input cannot be in one pass; run them apart")
    return [sample.value for sample in samples]
