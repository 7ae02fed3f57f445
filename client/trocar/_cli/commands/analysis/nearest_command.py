"""`trocar analyse nearest`: the images of a set that are nearest to others."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trocar import Client
from trocar._cli.console import show_json, show_report
from trocar._cli.options.arguments import AsJson, BatchSize, ModelId
from trocar._cli.options.choices import MetricChoice
from trocar._cli.options.completion import complete_modules
from trocar._cli.options.execution_options import FlagTexts, parse_flags
from trocar._cli.options.input_sets import ImagesOrFolders, Plot, analysing, check_plot, read_set
from trocar._cli.options.tables import TableFile, check_table


def nearest(  # noqa: PLR0913 - one parameter for each option
    client: Client,
    model_id: ModelId,
    images: ImagesOrFolders,
    *,
    query: Annotated[
        list[Path],
        typer.Option(metavar="IMAGE", help="Image or .npy file to compare with; repeat for more."),
    ],
    at: Annotated[
        str,
        typer.Option(
            metavar="SELECTOR", autocompletion=complete_modules, help="Place of the features to compare."
        ),
    ] = "avgpool",
    k: Annotated[int, typer.Option("-k", metavar="NUMBER", min=1, help="Images for each query.")] = 5,
    metric: Annotated[MetricChoice, typer.Option(help="How features are compared.")] = MetricChoice.COSINE,
    plot: Plot = None,
    out: TableFile = None,
    flag: FlagTexts = None,
    batch: BatchSize = 16,
    as_json: AsJson = False,
) -> None:
    """Print the images of a set that are nearest to a query in their features.

    Positions are averaged. An image that is in the set is its own neighbour.
    """
    check_plot(plot)
    check_table(out)
    flags = parse_flags(flag)
    sets = {model_id: read_set(client, model_id, images), "query": read_set(client, model_id, query)}
    with analysing(batch, flags, **sets) as (inputs, queries):
        near = client.nearest(model_id, inputs, at, queries, k, metric=metric.value)
    if as_json:
        show_json(
            [
                {"query": name, "neighbours": [asdict(one) for one in row]}
                for name, row in zip(near.queries, near, strict=True)
            ]
        )
    else:
        show_report(near)
    if plot:
        near.plot(plot)
    if out:
        near.save(out)
