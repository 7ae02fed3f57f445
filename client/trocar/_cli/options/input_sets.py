"""Input sets of the analyses: files and folders in, batches with a progress bar out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from trocar import Client
from trocar._analysis.analysis_inputs import images_in
from trocar._cli.failures import USAGE, fail, refuse
from trocar._cli.options.completion import complete_modules
from trocar._cli.options.samples import InputSample, batches, expand
from trocar._cli.runs.pass_run import samples_for, span
from trocar._extras import need
from trocar.errors import MissingExtraError

IMAGES_HELP = (
    "JPEG, PNG or WebP files, .npy files with the model's input, folders of images, or quoted patterns such "
    "as 'photos/*.jpg'."
)
ImagesOrFolders = Annotated[list[str], typer.Argument(metavar="IMAGES", help=IMAGES_HELP)]
OptionalTaps = Annotated[
    list[str] | None,
    typer.Option(
        "--tap",
        metavar="SELECTOR",
        autocompletion=complete_modules,
        help="Module to check; repeat for more. Default: all modules.",
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", dir_okay=False, help="Also save a picture, for example out.png."),
]

PlotAll = Annotated[
    bool,
    typer.Option("--plot-all", help="Draw all modules. Default: at most the 30 most relevant."),
]
Tolerance = Annotated[
    float,
    typer.Option(metavar="ERROR", min=0, help="Relative error up to which feature maps count as equal."),
]


class ShownBatches:
    """Samples in batches; a bar advances as they are taken.

    Args:
        samples: The samples.
        size: The most samples in one batch.
        progress: The bars.
        task: The bar of these samples.
    """

    def __init__(self, samples: Sequence[InputSample], size: int, progress: Progress, task: TaskID) -> None:
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


def read_set(client: Client, model_id: str, sources: Sequence[str | Path]) -> list[InputSample]:
    """List the samples in files, in the images of folders, and in what matches patterns.

    Raises:
        TrocarError: There are arrays, and the model is unknown or not loaded.
        typer.BadParameter: There is no such file, a folder has no images, or an array does not fit the model.
    """
    paths = [path for source in sources for path in expand(source)]
    try:
        files = [file for path in paths for file in (images_in(path) if path.is_dir() else [path])]
    except ValueError as error:
        refuse(str(error))
    return samples_for(client, model_id, files)


@contextmanager
def analysing(size: int, **sets: Sequence[InputSample]) -> Iterator[list[ShownBatches]]:
    """Yield batches of each set, with a bar on the terminal; inputs that do not fit end the command.

        with analysing(batch, real=real, generated=generated) as (a, b):
            result = client.fid(model_id, a, b)

    Raises:
        typer.BadParameter: The analysis rejected its inputs.
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
    """Check that a plot can be written, before anything is computed for it.

    Raises:
        typer.BadParameter: No picture has this suffix, or the folder does not exist.
        typer.Exit: matplotlib is missing.
    """
    if path is None:
        return
    try:
        need(option, "plot", "matplotlib.backend_bases", "matplotlib.figure")
    except MissingExtraError as error:
        fail(str(error), USAGE)
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in kinds:
        refuse(f"{option}: {path.name!r} must end in one of {', '.join(f'.{kind}' for kind in kinds)}")
    if not path.parent.is_dir():
        refuse(f"{option}: no folder {path.parent}")
