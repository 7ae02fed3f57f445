"""`trocar health`: how gradients flow through a model."""

from typing import Annotated

import typer

from trocar import Client
from trocar._analysis.health import HealthThresholds
from trocar._cli.arguments import AsJson, ModelId
from trocar._cli.edit_options import EditTexts, parse_edits
from trocar._cli.failures import refuse
from trocar._cli.input_sets import ImagesOrFolders, Plot, check_plot
from trocar._cli.objectives import Labels, Of, read_objective
from trocar._cli.one_pass import read_pass
from trocar._cli.output import show_json


def health(  # noqa: PLR0913 - options of a command
    client: Client,
    model_id: ModelId,
    images: ImagesOrFolders,
    *,
    of: Of = None,
    labels: Labels = None,
    at: Annotated[
        list[str] | None,
        typer.Option(help="Where to look; everywhere when none is given; repeat for more."),
    ] = None,
    vanishing: Annotated[float, typer.Option(min=0, help="Flag norms of gradients below this.")] = 1e-6,
    exploding: Annotated[float, typer.Option(min=0, help="Flag norms of gradients above this.")] = 1e3,
    vanishing_ratio: Annotated[
        float, typer.Option(min=0, help="Flag ratios of a parameter gradient to its parameters below this.")
    ] = 1e-6,
    exploding_ratio: Annotated[float, typer.Option(min=0, help="Flag such ratios above this.")] = 1e3,
    edit: EditTexts = None,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Print how gradients flow: their norms at every module, zeros, NaN, and what vanishes or explodes.

    One forward and one backward pass; all images are one batch. No values are sent.
    """
    check_plot(plot)
    try:
        HealthThresholds(vanishing, exploding, vanishing_ratio, exploding_ratio)
    except ValueError as error:
        refuse(f"--{str(error).replace('_', '-')}")
    edits, inputs = parse_edits(edit), read_pass(client, model_id, images)
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
        typer.echo(f"{report}\nof {wanted.text}")
    if plot:
        report.plot(plot)
