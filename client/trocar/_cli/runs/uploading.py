"""Data sets of the command line: uploaded with a progress bar, or looked up on the server."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from trocar import Client
from trocar._cli.failures import refuse
from trocar._extras import need_for_source
from trocar._result.fit_progress import FitProgress, SilentProgress
from trocar._result.fit_progress_rich import RichProgress
from trocar._wire.stored_datasets import StoredDataset, is_dataset_id
from trocar.errors import UnknownDatasetError


def bars() -> FitProgress:
    """Return bars on stderr; silent if stderr is no terminal."""
    console = Console(stderr=True)
    return RichProgress(console) if console.is_terminal else SilentProgress()


def check_data(client: Client, text: str, option: str) -> None:
    """Reject a name that is neither data on this machine nor a data set on the server.

    Raises:
        typer.BadParameter: It is neither.
        MissingExtraError: The library that reads it is not installed.
    """
    need_for_source(text)
    if Path(text).exists() or text.startswith(("hf:", "torch:")):
        return
    if not is_dataset_id(text):
        refuse(f"{option}: no file or folder {text!r}")
    try:
        client.dataset(text)
    except UnknownDatasetError:
        refuse(
            f"{option}: no folder {text!r} here, and no data set of this id on the server; "
            "`trocar datasets list` shows what there is"
        )


def stored(client: Client, text: str, shown: FitProgress) -> StoredDataset:
    """Return a data set on the server: uploaded from this machine, or the one of this id.

    Raises:
        typer.BadParameter: The source is no valid data set.
    """
    with refused_sources():
        if is_dataset_id(text):
            return client.dataset(text)
        return client.upload_dataset(text, progress=shown.show_upload)


@contextmanager
def refused_sources() -> Iterator[None]:
    """Convert errors of a local source to errors of the command line."""
    try:
        yield
    except (TypeError, ValueError) as error:
        refuse(str(error))
