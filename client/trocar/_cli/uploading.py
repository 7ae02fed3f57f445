"""Data sets of the command line: uploaded with a bar, or found on the server."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from trocar import Client
from trocar._cli.failures import refuse
from trocar._fit_progress import FitProgress, SilentProgress
from trocar._fit_progress_rich import RichProgress
from trocar._stored_datasets import StoredDataset, is_dataset_id
from trocar.errors import UnknownDatasetError


def bars() -> FitProgress:
    """Return bars on stderr; nothing where stderr is no terminal."""
    console = Console(stderr=True)
    return RichProgress(console) if console.is_terminal else SilentProgress()


def check_data(client: Client, text: str, option: str) -> None:
    """Refuse what is nothing on this machine and no data set on the server.

    Raises:
        typer.BadParameter: It is neither.
    """
    if Path(text).exists() or text.startswith(("hf:", "torch:")):
        return
    if not is_dataset_id(text):
        refuse(f"{option}: there is no folder or file {text!r}")
    try:
        client.dataset(text)
    except UnknownDatasetError:
        refuse(
            f"{option}: there is no folder {text!r} here, and no data set of this id on the server; "
            "`trocar datasets list` shows what there is"
        )


def stored(client: Client, text: str, shown: FitProgress) -> StoredDataset:
    """Return a data set on the server: uploaded from this machine, or the one of this id.

    Raises:
        typer.BadParameter: No data set can be made of what is there.
    """
    with refused_sources():
        if is_dataset_id(text):
            return client.dataset(text)
        return client.upload_dataset(text, progress=shown.show_upload)


@contextmanager
def refused_sources() -> Iterator[None]:
    """Turn what is wrong with a source of this machine into an error of the command line."""
    try:
        yield
    except (TypeError, ValueError) as error:
        refuse(str(error))
