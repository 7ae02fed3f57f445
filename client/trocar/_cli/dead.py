"""`trocar dead`: channels that never speak."""

from typing import Annotated

import typer

from trocar import Client
from trocar._cli.arguments import AsJson, BatchSize, ModelId
from trocar._cli.input_sets import ImagesOrFolders, OptionalTaps, Plot, analysing, check_plot, read_set
from trocar._cli.output import show_json


def dead(
    client: Client,
    model_id: ModelId,
    images: ImagesOrFolders,
    *,
    tap: OptionalTaps = None,
    threshold: Annotated[
        float, typer.Option(min=0, help="The largest absolute value of a dead channel.")
    ] = 0.0,
    plot: Plot = None,
    batch: BatchSize = 16,
    as_json: AsJson = False,
) -> None:
    """Print which channels stay at zero on all images, and which hold NaN.

    No values are sent. Feature maps without such channels are left out of the table, not of the JSON.
    """
    check_plot(plot)
    samples = read_set(client, model_id, images)
    with analysing(batch, **{model_id: samples}) as (inputs,):
        report = client.dead_channels(model_id, inputs, tap or "**", threshold=threshold)
    if as_json:
        show_json(report)
    else:
        typer.echo(str(report))
    if plot:
        report.plot(plot)
