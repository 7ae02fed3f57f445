"""`trocar stats`: summary statistics of feature maps, without their values."""

from enum import StrEnum
from typing import Annotated

import typer

from trocar import Client
from trocar._cli.console import show_json
from trocar._cli.failures import refuse
from trocar._cli.options.arguments import (
    NUMBERS,
    AsJson,
    BatchSize,
    ModelId,
    Taps,
    parse_statistics,
    statistics_taps,
)
from trocar._cli.options.edit_options import EditTexts, parse_edits
from trocar._cli.options.execution_options import (
    AdapterOption,
    FlagTexts,
    NumericsOption,
    parse_flags,
    wire_numerics,
)
from trocar._cli.options.input_sets import ImagesOrFolders, read_set
from trocar._cli.runs.pass_run import run_passes
from trocar._cli.runs.statistics_view import StatisticsTable, show_statistics


class Over(StrEnum):
    """What statistics are taken over."""

    ALL = "all"
    CHANNEL = "channel"
    SAMPLE = "sample"


def stats(  # noqa: PLR0913 - one parameter for each option
    client: Client,
    model_id: ModelId,
    images: ImagesOrFolders,
    tap: Taps,
    *,
    over: Annotated[Over, typer.Option(help="Compute over all images, per channel or per image.")] = Over.ALL,
    stats: Annotated[
        str, typer.Option(metavar="NAMES", help=f"Statistics, of {', '.join(NUMBERS)}.")
    ] = "mean,std,min,max,zero_fraction",
    edit: EditTexts = None,
    numerics: NumericsOption = None,
    adapter: AdapterOption = "",
    flag: FlagTexts = None,
    batch: BatchSize = 16,
    as_json: AsJson = False,
) -> None:
    """Print statistics of the outputs of modules on images.

    The values stay on the server. Several batches give what one batch of all images would.
    """
    names = parse_statistics(stats)
    if not names:
        refuse("--stats: name at least one statistic")
    taps, edits = statistics_taps(tap, names, values=False, over=over.value), parse_edits(edit)
    samples = read_set(client, model_id, images)
    statistics = StatisticsTable(names)
    loosest, flags = wire_numerics(numerics), parse_flags(flag)
    for _ in run_passes(
        client, model_id, samples, taps, batch, statistics, edits, loosest, adapter=adapter, flags=flags
    ):
        pass
    sample_names = [sample.name for sample in samples]
    if as_json:
        report = {"over": over.value, "image_count": len(samples), "shapes": statistics.shapes}
        show_json({**report, "images": sample_names, "stats": statistics.values()})
        return
    show_statistics(statistics, sample_names if over is Over.SAMPLE else ())
