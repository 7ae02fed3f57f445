"""`trocar diff`: two models on the same images."""

from dataclasses import asdict
from typing import Annotated

import typer

from trocar import Client
from trocar._cli.console import show_json, show_report
from trocar._cli.options.arguments import AsJson, BatchSize
from trocar._cli.options.completion import complete_models, complete_modules
from trocar._cli.options.edit_options import parse_edits
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


def diff(  # noqa: PLR0913 - one parameter for each option
    client: Client,
    model_a: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_A",
            autocompletion=complete_models,
            help="The id of a loaded model.",
        ),
    ],
    model_b: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_B",
            autocompletion=complete_models,
            help="The model to compare it with.",
        ),
    ],
    images: ImagesOrFolders,
    *,
    tap: OptionalTaps = None,
    tap_b: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SELECTOR",
            autocompletion=complete_modules,
            help="Selector in the second model, if names differ: one per --tap, in order.",
        ),
    ] = None,
    edit_a: Annotated[
        list[str] | None,
        typer.Option("--edit-a", metavar="EDIT", help="Edit in the first model, as --edit of extract."),
    ] = None,
    edit_b: Annotated[
        list[str] | None,
        typer.Option("--edit-b", metavar="EDIT", help="Edit in the second model; repeat for more."),
    ] = None,
    tolerance: Tolerance = 1e-5,
    plot: Plot = None,
    plot_all: PlotAll = False,
    flag: FlagTexts = None,
    batch: BatchSize = 16,
    as_json: AsJson = False,
) -> None:
    """Compare the feature maps of two models on the same images.

    Cosine, relative error and largest difference, in execution order, and where they first diverge.
    """
    check_plot(plot)
    edits_a, edits_b = parse_edits(edit_a, "--edit-a"), parse_edits(edit_b, "--edit-b")
    flags, samples = parse_flags(flag), read_set(client, model_a, images)
    with analysing(batch, flags, **{f"{model_a}, {model_b}": samples}) as (inputs,):
        result = client.diff(
            model_a,
            model_b,
            inputs,
            tap or "**",
            taps_b=tap_b or None,
            edits_a=edits_a,
            edits_b=edits_b,
            tolerance=tolerance,
        )
    if as_json:
        show_json({**asdict(result), "first_diverging": result.first_diverging})
    else:
        show_report(result)
    if plot:
        result.plot(plot, all_rows=plot_all)
