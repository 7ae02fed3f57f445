"""`trocar compare`: a model before and after an edit, or two models, with their classes."""

from typing import Annotated

import typer

from trocar import Client
from trocar._cli.commands.inspection.predict_command import Top
from trocar._cli.console import show_json, show_report
from trocar._cli.failures import refuse
from trocar._cli.options.arguments import AsJson, BatchSize, ModelId
from trocar._cli.options.completion import complete_models
from trocar._cli.options.edit_options import EditTexts, parse_edits
from trocar._cli.options.execution_options import FlagTexts, parse_flags
from trocar._cli.options.input_sets import (
    ImagesOrFolders,
    OptionalTaps,
    Plot,
    PlotAll,
    Tolerance,
    analysing,
    check_plot,
    read_set,
)


def compare(  # noqa: PLR0913 - one parameter for each option
    client: Client,
    model_id: ModelId,
    images: ImagesOrFolders,
    *,
    edit: EditTexts = None,
    other: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            autocompletion=complete_models,
            help="Compare with this model instead of the same one.",
        ),
    ] = None,
    tap: OptionalTaps = None,
    top: Top = 5,
    tolerance: Tolerance = 1e-5,
    plot: Plot = None,
    plot_all: PlotAll = False,
    flag: FlagTexts = None,
    batch: BatchSize = 16,
    as_json: AsJson = False,
) -> None:
    """Compare a model before and after edits, or two models, on the same images.

    What happened to the best class of each image, and which values differ how much.
    """
    check_plot(plot)
    edits = parse_edits(edit)
    if not edits and other is None:
        refuse("name a difference: --edit 'layer3 zero channels=1,2', or --other MODEL")
    flags, samples = parse_flags(flag), read_set(client, model_id, images)
    with analysing(batch, flags, **{model_id: samples}) as (inputs,):
        found = client.compare(
            model_id, inputs, edits=edits, other=other, taps=tap or None, top=top, tolerance=tolerance
        )
    if as_json:
        show_json(found)
    else:
        show_report(found)
    if plot:
        found.plot(plot, all_rows=plot_all)
