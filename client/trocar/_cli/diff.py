"""`trocar diff`: two models on the same images."""

from dataclasses import asdict
from typing import Annotated

import typer

from trocar import Client
from trocar._cli.arguments import AsJson, BatchSize
from trocar._cli.input_sets import ImagesOrFolders, OptionalTaps, Plot, analysing, check_plot, read_set
from trocar._cli.output import show_json


def diff(  # noqa: PLR0913 - one parameter for each option
    client: Client,
    model_a: Annotated[str, typer.Argument(metavar="MODEL_A", help="The id of a loaded model.")],
    model_b: Annotated[str, typer.Argument(metavar="MODEL_B", help="The model to compare it with.")],
    images: ImagesOrFolders,
    *,
    tap: OptionalTaps = None,
    tap_b: Annotated[
        list[str] | None,
        typer.Option(help="Of the second model, where names differ: one for each --tap, in their order."),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0, help="The largest relative error of what counts as equal.")
    ] = 1e-5,
    plot: Plot = None,
    batch: BatchSize = 16,
    as_json: AsJson = False,
) -> None:
    """Compare two models on the same images, feature map by feature map.

    Cosine, relative error and largest difference, in execution order, and where they first diverge.
    """
    check_plot(plot)
    samples = read_set(client, model_a, images)
    with analysing(batch, **{f"{model_a}, {model_b}": samples}) as (inputs,):
        result = client.diff(model_a, model_b, inputs, tap or "**", taps_b=tap_b or None, tolerance=tolerance)
    if as_json:
        show_json({**asdict(result), "first_diverging": result.first_diverging})
    else:
        typer.echo(str(result))
    if plot:
        result.plot(plot)
