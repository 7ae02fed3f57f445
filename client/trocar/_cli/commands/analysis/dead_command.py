"""`trocar analyse dead`: dead channels."""

from typing import Annotated

import typer

from trocar import Client
from trocar._cli.console import show_json, show_report
from trocar._cli.options.arguments import AsJson, BatchSize, ModelId
from trocar._cli.options.execution_options import FlagTexts, parse_flags
from trocar._cli.options.input_sets import (
    ImagesOrFolders,
    OptionalTaps,
    Plot,
    PlotAll,
    analysing,
    check_plot,
    read_set,
)


def dead(  # noqa: PLR0913 - one parameter for each option
    client: Client,
    model_id: ModelId,
    images: ImagesOrFolders,
    *,
    tap: OptionalTaps = None,
    threshold: Annotated[
        float,
        typer.Option(
            metavar="VALUE", min=0, help="Channels whose absolute maximum is at most this count as dead."
        ),
    ] = 0.0,
    plot: Plot = None,
    plot_all: PlotAll = False,
    flag: FlagTexts = None,
    batch: BatchSize = 16,
    as_json: AsJson = False,
) -> None:
    """Print channels that are zero on all images, or contain NaN.

    No values are sent. Feature maps without such channels are left out of the table, not of the JSON.
    """
    check_plot(plot)
    flags, samples = parse_flags(flag), read_set(client, model_id, images)
    with analysing(batch, flags, **{model_id: samples}) as (inputs,):
        report = client.dead_channels(model_id, inputs, tap or "**", threshold=threshold)
    if as_json:
        show_json(report)
    else:
        show_report(report)
    if plot:
        report.plot(plot, all_rows=plot_all)
