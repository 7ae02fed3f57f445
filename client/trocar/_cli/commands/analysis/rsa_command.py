"""`trocar analyse rsa`: how alike modules arrange the same images."""

from typing import Annotated

import typer

from trocar import Client
from trocar._cli.console import show_json, show_report
from trocar._cli.options.arguments import AsJson, BatchSize, ModelId, OtherModel, OtherTaps, Taps
from trocar._cli.options.choices import CompareChoice, DistanceChoice
from trocar._cli.options.execution_options import FlagTexts, parse_flags
from trocar._cli.options.input_sets import ImagesOrFolders, Plot, analysing, check_plot, read_set


def rsa(  # noqa: PLR0913 - one parameter for each option
    client: Client,
    model_id: ModelId,
    images: ImagesOrFolders,
    *,
    tap: Taps,
    other: OtherModel = None,
    other_tap: OtherTaps = None,
    distance: Annotated[
        DistanceChoice, typer.Option(help="How two images differ.")
    ] = DistanceChoice.CORRELATION,
    compare: Annotated[
        CompareChoice, typer.Option(help="How the dissimilarities of two modules are compared.")
    ] = CompareChoice.SPEARMAN,
    plot: Plot = None,
    rdms: Annotated[
        bool, typer.Option("--rdms", help="Draw the dissimilarities of all pairs of images instead.")
    ] = False,
    flag: FlagTexts = None,
    batch: BatchSize = 16,
    as_json: AsJson = False,
) -> None:
    """Print the representational similarity of modules of one or two models."""
    check_plot(plot)
    flags, samples = parse_flags(flag), read_set(client, model_id, images)
    with analysing(batch, flags, **{model_id: samples}) as (inputs,):
        result = client.rsa(
            model_id,
            inputs,
            tap,
            other=other,
            other_taps=other_tap or None,
            distance=distance.value,
            compare=compare.value,
        )
    if as_json:
        show_json(
            {
                "rows": result.rows,
                "columns": result.columns,
                "matrix": result.matrix,
                "rdms": result.rdms,
                "title": result.title,
            }
        )
    else:
        show_report(result)
    if plot:
        result.plot(plot, rdms=rdms)
