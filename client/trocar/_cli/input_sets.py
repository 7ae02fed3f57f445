"""Sets of images for the analyses: files and folders in, batches with a progress bar out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from trocar import Client
from trocar._analysis.inputs import images_in
from trocar._cli.failures import USAGE, fail, refuse
from trocar._cli.passes import samples_for, span
from trocar._cli.samples import Sample, batches

ImagesOrFolders = Annotated[
    list[Path],
    typer.Argument(
        metavar="IMAGES",
        exists=True,
        help="JPEG, PNG or WebP files, .npy files with the model's input, or folders of images.",
    ),
]
OptionalTaps = Annotated[
    list[str] | None,
    typer.Option("--tap", help="Where to look; everywhere when none is given; repeat for more."),
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", dir_okay=False, help="Save a picture as well, for example out.png."),
]


class ShownBatches:
    """Samples in batches; a bar advances as they are taken.

    Args:
        samples: The samples.
        size: The most samples in one batch.
        progress: The bars.
        task: The bar of these samples.
    """

    def __init__(self, samples: Sequence[Sample], size: int, progress: Progress, task: TaskID) -> None:
        self._batches = list(batches(samples, size))
        self._progress = progress
        self._task = task

    def __iter__(self) -> Iterator[list[Any]]:
        for batch in self._batches:
            yield [sample.value for sample in batch]
            self._progress.advance(self._task, len(batch))

    def label(self, index: int) -> str:
        """Name the batch at a position by its files."""
        return span(self._batches[index])

    def sample_label(self, index: int, position: int) -> str:
        """Name a sample of the batch at a position by its file."""
        batch = self._batches[index]
        return batch[position].name if position < len(batch) else ""


def read_set(client: Client, model_id: str, paths: Sequence[Path]) -> list[Sample]:
    """List the samples in files and in the images of folders.

    Raises:
        TrocarError: There are arrays, and the model is unknown or not loaded.
        typer.BadParameter: A folder has no images, or an array does not fit the model.
    """
    try:
        files = [file for path in paths for file in (images_in(path) if path.is_dir() else [path])]
    except ValueError as error:
        refuse(str(error))
    return samples_for(client, model_id, files)


@contextmanager
def analysing(size: int, **sets: Sequence[Sample]) -> Iterator[list[ShownBatches]]:
    """Give batches of each set, with a bar on the terminal, and end the command where they do not fit.

        with analysing(batch, real=real, generated=generated) as (a, b):
            result = client.fid(model_id, a, b)

    Raises:
        typer.BadParameter: The analysis refused what it was given.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        try:
            yield [
                ShownBatches(samples, size, progress, progress.add_task(name, total=len(samples)))
                for name, samples in sets.items()
            ]
        except (TypeError, ValueError) as error:
            refuse("\n".join([str(error), *getattr(error, "__notes__", ())]))


def check_plot(path: Path | None, option: str = "--plot") -> None:
    """Check that a picture could be written, before anything is computed for it.

    Raises:
        typer.BadParameter: No picture has this suffix, or the folder is not there.
        typer.Exit: matplotlib is missing.
    """
    if path is None:
        return
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError:
        fail(f'{option} needs matplotlib: pip install "trocar[plot]"', USAGE)
    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        refuse(f"{option}: {path.name!r} must end in one of {', '.join(f'.{kind}' for kind in kinds)}")
    if not path.parent.is_dir():
        refuse(f"{option}: there is no folder {path.parent}")
