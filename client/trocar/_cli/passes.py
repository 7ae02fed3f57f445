"""Many images through one model: one call per batch, with a progress bar."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trocar import Client, FeatureMaps, ModelNotLoadedError, Tap, TrocarError
from trocar._cli.failures import refuse
from trocar._cli.samples import ARRAY_SUFFIX, Sample, batches, read_samples


@dataclass(frozen=True)
class Pass:
    """What one batch gave."""

    samples: list[Sample]
    maps: FeatureMaps


def samples_for(client: Client, model_id: str, paths: Sequence[Path]) -> list[Sample]:
    """List the samples in files; what one sample of an array is, the model says.

    Raises:
        TrocarError: There are arrays, and the model is unknown or not loaded.
        typer.BadParameter: An array does not fit the model.
    """
    if all(path.suffix != ARRAY_SUFFIX for path in paths):
        return read_samples(paths, sample_rank=0)
    model = client.model(model_id)
    if not model.is_loaded:
        raise ModelNotLoadedError(
            f"model '{model_id}' is {model.state}; load it first: trocar load {model_id}"
        )
    return read_samples(paths, len(model.input_shape))


def run_passes(
    client: Client, model_id: str, samples: Sequence[Sample], taps: Sequence[Tap], batch_size: int
) -> Iterator[Pass]:
    """Yield what each batch gave, in order; a bar on the terminal shows how far it is.

    Raises:
        TrocarError: A call failed; its notes say for which files.
        typer.BadParameter: The arrays of a batch differ in shape or cannot be sent.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(model_id, total=len(samples))
        for batch in batches(samples, batch_size):
            try:
                maps = client.extract(model_id, [sample.value for sample in batch], taps)
            except TrocarError as error:
                error.add_note(f"while extracting {span(batch)}")
                raise
            except (TypeError, ValueError) as error:
                refuse(f"{span(batch)}: {error}")
            yield Pass(batch, maps)
            progress.advance(task, len(batch))


def span(samples: Sequence[Sample]) -> str:
    """Name a batch by its first and last sample."""
    first, last = samples[0].name, samples[-1].name
    return first if len(samples) == 1 else f"{first} to {last}"
