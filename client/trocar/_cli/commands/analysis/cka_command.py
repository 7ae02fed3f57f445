"""`trocar analyse cka`: similarity of the features of modules."""

from typing import Annotated

import typer

from trocar import Client
from trocar._cli.console import show_json, show_report
from trocar._cli.options.arguments import AsJson, BatchSize, ModelId, OtherModel, OtherTaps, Taps
from trocar._cli.options.execution_options import FlagTexts, parse_flags
from trocar._cli.options.input_sets import ImagesOrFolders, Plot, analysing, check_plot, read_set


def cka(  # noqa: PLR0913 - one parameter for each option
    client: Client,
    model_id: ModelId,
    images: ImagesOrFolders,
    *,
    tap: Taps,
    other: OtherModel = None,
    other_tap: OtherTaps = None,
    debiased: Annotated[
        bool, typer.Option("--debiased", help="Use the debiased estimator, for few samples.")
    ] = False,
    plot: Plot = None,
    flag: FlagTexts = None,
    batch: BatchSize = 16,
    as_json: AsJson = False,
) -> None:
    """Print the linear CKA between modules of one or two models."""
    check_plot(plot)
    flags, samples = parse_flags(flag), read_set(client, model_id, images)
    with analysing(batch, flags, **{model_id: samples}) as (inputs,):
        result = client.cka(
            model_id, inputs, tap, other=other, other_taps=other_tap or None, debiased=debiased
        )
    if as_json:
        show_json(result)
    else:
        show_report(result)
    if plot:
        result.plot(plot)
