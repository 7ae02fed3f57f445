"""Run of many images through one model: prefetch, one call per batch, a progress bar."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trocar import Client, ExtractStream, FeatureMaps, Tap
from trocar._base.call_options import CallOptions, Numerics
from trocar._cli.failures import refuse
from trocar._cli.options.samples import InputSample, read_samples
from trocar._cli.runs.statistics_view import StatisticsTable
from trocar._export.decoding import Loaded, keep_encoded, load
from trocar._export.prefetch import BATCHES_AHEAD, ReadAhead
from trocar._export.results import Outcome, outcomes
from trocar._export.sample_batches import cut
from trocar._request.edits import Edit
from trocar._request.inputs import NO_FLAGS
from trocar._sources import sample as datasets
from trocar._sources.arrays import ARRAY_SUFFIX
from trocar._sources.files import read_file
from trocar.errors import ModelNotLoadedError


@dataclass(frozen=True)
class Pass:
    """Result of one batch."""

    samples: list[InputSample]
    maps: FeatureMaps


def samples_for(client: Client, model_id: str, paths: Sequence[Path]) -> list[InputSample]:
    """List the samples in files; the model determines the rank of an array's sample.

    Raises:
        TrocarError: There are arrays, and the model is unknown or not loaded.
        typer.BadParameter: An array does not fit the model, or there is no sample.
    """
    samples = _listed(client, model_id, paths)
    if not samples:
        refuse(f"{', '.join(map(str, paths))}: no samples; arrays need at least one row")
    return samples


def _listed(client: Client, model_id: str, paths: Sequence[Path]) -> list[InputSample]:
    if all(path.suffix.lower() != ARRAY_SUFFIX for path in paths):
        return read_samples(paths, sample_rank=0)
    model = client.model(model_id)
    if not model.is_loaded:
        raise ModelNotLoadedError(
            f"model '{model_id}' is {model.state}; load it first: trocar admin load {model_id}"
        )
    return read_samples(paths, len(model.input_shape))


def run_passes(  # noqa: PLR0913 - the options of a pass
    client: Client,
    model_id: str,
    samples: Sequence[InputSample],
    taps: Sequence[Tap],
    batch_size: int,
    statistics: StatisticsTable,
    edits: Sequence[str | Edit] = (),
    numerics: Numerics | None = None,
    *,
    adapter: str = "",
    flags: Mapping[str, bool | int | str] = NO_FLAGS,
) -> Iterator[Pass]:
    """Yield the result of each batch, in order; a bar on the terminal shows progress.

    Args:
        client: The client.
        model_id: The model.
        samples: Samples to send.
        taps: Values to collect.
        batch_size: Samples per batch.
        statistics: Collects the statistics: per sample with each batch, others at the end, over all.
        edits: Edits of every pass.
        numerics: The loosest numbers that will do; the model's default when None.
        adapter: The caller's LoRA adapter that every pass runs with.
        flags: Flags of the forward, by name.

    Raises:
        TrocarError: A call failed, or arrays of a batch differ; its notes say for which files.
        OSError: A file cannot be read.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with (
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
        ReadAhead(enumerate(samples), _load, depth=BATCHES_AHEAD * batch_size) as loaded,
    ):
        task = progress.add_task(model_id, total=len(samples))
        batches = cut(loaded, batch_size)
        at_end = _finishing(statistics)
        result = outcomes(
            client,
            model_id,
            batches,
            taps,
            edits=edits,
            how=CallOptions(numerics=numerics),
            adapter=adapter,
            flags=flags,
            at_end=at_end,
        )
        for outcome in result:
            batch, maps = outcome.batch, _maps(outcome)
            statistics.add(maps)
            yield Pass([samples[sample.index] for sample in batch.samples], maps)
            progress.advance(task, len(batch.samples))


def _finishing(statistics: StatisticsTable) -> Callable[[ExtractStream], None]:
    return lambda stream: statistics.finish(stream.statistics, stream.info)


def span(samples: Sequence[InputSample]) -> str:
    """Name a batch by its first and last sample."""
    first, last = samples[0].name, samples[-1].name
    return first if len(samples) == 1 else f"{first} to {last}"


def _load(item: tuple[int, InputSample]) -> Loaded:
    index, sample = item
    value = sample.value
    read = partial(read_file, value) if isinstance(value, Path) else partial(np.array, value)
    return load(index, datasets.Sample(sample.name, read), keep_encoded)


def _maps(outcome: Outcome) -> FeatureMaps:
    errors = [sample.error for sample in outcome.batch.samples if sample.error is not None]
    if errors:
        raise errors[0]
    if outcome.maps is not None:
        return outcome.maps
    assert outcome.error is not None  # every sample was read, so the batch was sent, or rejected
    outcome.error.add_note(f"while extracting {outcome.batch.place(outcome.error)}")
    raise outcome.error
