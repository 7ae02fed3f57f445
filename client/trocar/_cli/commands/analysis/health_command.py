"""`trocar analyse health`: gradient flow through a model."""

from typing import Annotated

import typer

from trocar import Client
from trocar._analysis.health import HealthThresholds
from trocar._cli.console import show_json, show_report
from trocar._cli.failures import refuse
from trocar._cli.options.arguments import AsJson, ModelId
from trocar._cli.options.completion import complete_modules
from trocar._cli.options.edit_options import EditTexts, parse_edits
from trocar._cli.options.execution_options import FlagTexts, parse_flags
from trocar._cli.options.input_sets import ImagesOrFolders, Plot, PlotAll, check_plot
from trocar._cli.options.objective_options import Labels, Of, read_objective
from trocar._cli.options.one_pass import read_pass
from trocar._request.inputs import with_flags


def health(  # noqa: PLR0913 - options of a command
    client: Client,
    model_id: ModelId,
    images: ImagesOrFolders,
    *,
    of: Of = None,
    labels: Labels = None,
    at: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SELECTOR",
            autocompletion=complete_modules,
            help="Module to check; repeat for more. Default: all modules.",
        ),
    ] = None,
    vanishing: Annotated[
        float, typer.Option(metavar="LIMIT", min=0, help="Flag norms of gradients below this.")
    ] = 1e-6,
    exploding: Annotated[
        float, typer.Option(metavar="LIMIT", min=0, help="Flag norms of gradients above this.")
    ] = 1e3,
    vanishing_ratio: Annotated[
        float,
        typer.Option(
            metavar="LIMIT", min=0, help="Flag ratios of a parameter gradient to its parameters below this."
        ),
    ] = 1e-6,
    exploding_ratio: Annotated[
        float, typer.Option(metavar="LIMIT", min=0, help="Flag such ratios above this.")
    ] = 1e3,
    edit: EditTexts = None,
    flag: FlagTexts = None,
    plot: Plot = None,
    plot_all: PlotAll = False,
    as_json: AsJson = False,
) -> None:
    """Print gradient norms by module; flag vanishing and exploding.

    One forward and one backward pass; all images are one batch. No values are sent.
    """
    check_plot(plot)
    try:
        HealthThresholds(vanishing, exploding, vanishing_ratio, exploding_ratio)
    except ValueError as error:
        refuse(f"--{str(error).replace('_', '-')}")
    edits, flags = parse_edits(edit), parse_flags(flag)
    inputs = with_flags(read_pass(client, model_id, images), flags)
    wanted = read_objective(client, model_id, inputs, of, labels)
    report = client.health(
        model_id,
        inputs,
        wanted.objective,
        at=at or "**",
        edits=edits,
        vanishing=vanishing,
        exploding=exploding,
        vanishing_ratio=vanishing_ratio,
        exploding_ratio=exploding_ratio,
    )
    if as_json:
        show_json({"of": wanted.text, **report.to_dict()})
    else:
        show_report(report)
        typer.echo(f"of {wanted.text}")
    if plot:
        report.plot(plot, all_rows=plot_all)
