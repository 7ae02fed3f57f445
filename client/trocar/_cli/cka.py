"""`trocar cka`: how alike the features of modules are."""

from typing import Annotated

import typer

from trocar import Client
from trocar._cli.arguments import AsJson, BatchSize, ModelId, Taps
from trocar._cli.input_sets import ImagesOrFolders, Plot, analysing, check_plot, read_set
from trocar._cli.output import show_json


def cka(  # noqa: PLR0913 - one parameter for each option
    client: Client,
    model_id: ModelId,
    images: ImagesOrFolders,
    *,
    tap: Taps,
    other: Annotated[str | None, typer.Option(metavar="MODEL", help="Another model for the columns.")] = None,
    other_tap: Annotated[
        list[str] | None,
        typer.Option(help="What makes the columns, where that is not --tap; repeat for more."),
    ] = None,
    debiased: Annotated[
        bool, typer.Option("--debiased", help="Estimate without the bias of few samples.")
    ] = False,
    plot: Plot = None,
    batch: BatchSize = 16,
    as_json: AsJson = False,
) -> None:
    """Print the linear CKA between modules of a model, or of two models, over the same images."""
    check_plot(plot)
    samples = read_set(client, model_id, images)
    with analysing(batch, **{model_id: samples}) as (inputs,):
        result = client.cka(
            model_id, inputs, tap, other=other, other_taps=other_tap or None, debiased=debiased
        )
    if as_json:
        show_json(result)
    else:
        typer.echo(str(result))
    if plot:
        result.plot(plot)
