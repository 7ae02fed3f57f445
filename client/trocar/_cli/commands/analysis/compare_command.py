"""`trocar compare`: a model before and after an edit, or two models, with their classes."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from trocar import Client, Comparison, Diff
from trocar._cli.commands.inspection.predict_command import Top
from trocar._cli.console import show_json, show_report
from trocar._cli.failures import refuse
from trocar._cli.options.arguments import AsJson, BatchSize, ModelId
from trocar._cli.options.completion import complete_models, complete_modules
from trocar._cli.options.edit_options import EditTexts, parse_edits
from trocar._cli.options.execution_options import FlagTexts, parse_flags
from trocar._cli.options.input_sets import (
    IMAGES_HELP,
    OptionalTaps,
    Plot,
    PlotAll,
    Tolerance,
    analysing,
    check_plot,
    read_set,
)
from trocar._cli.options.text_options import TextFile, TextsOption, read_texts
from trocar._request.inputs import with_flags
from trocar._request.texts import texts


def compare(  # noqa: PLR0913 - one parameter for each option
    client: Client,
    model_id: ModelId,
    images: Annotated[list[str] | None, typer.Argument(metavar="[IMAGES]...", help=IMAGES_HELP)] = None,
    *,
    text: TextsOption = None,
    text_file: TextFile = None,
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
    tap_other: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SELECTOR",
            autocompletion=complete_modules,
            help="Selector in the other model, if names differ: one per --tap, in order. Values alone are "
            "compared then, not classes.",
        ),
    ] = None,
    edit_before: Annotated[
        list[str] | None,
        typer.Option(
            "--edit-before",
            metavar="EDIT",
            help="Edit in the first model, as --edit; repeat for more. Values alone are compared then.",
        ),
    ] = None,
    top: Top = 5,
    tolerance: Tolerance = 1e-5,
    plot: Plot = None,
    plot_all: PlotAll = False,
    flag: FlagTexts = None,
    batch: BatchSize = 16,
    as_json: AsJson = False,
) -> None:
    """Compare a model before and after edits, or two models, on the same images or texts.

    What happened to the best class, or the most likely next token, of each, and which values differ how much:
    cosine, relative error and largest difference, in execution order, and where they first diverge.
    """
    check_plot(plot)
    edits, edits_before = parse_edits(edit), parse_edits(edit_before, "--edit-before")
    if not edits and not edits_before and other is None:
        refuse("name a difference: --edit 'layer3 zero channels=1,2', or --other MODEL")
    flags, sentences = parse_flags(flag), read_texts(text, text_file)
    if bool(sentences) == bool(images):
        refuse("name either IMAGES or texts: --text TEXT or --text-file FILE")
    sets = {model_id: read_set(client, model_id, images)} if images else {}
    result: Comparison | Diff
    with analysing(batch, flags, **sets) as listed:
        inputs: Any = listed[0] if listed else with_flags(texts(sentences), flags)
        if tap_other or edits_before:
            result = client.diff(
                model_id,
                other or model_id,
                inputs,
                tap or "**",
                taps_b=tap_other or None,
                edits_a=edits_before,
                edits_b=edits,
                tolerance=tolerance,
                batch_size=batch,
            )
        else:
            result = client.compare(
                model_id,
                inputs,
                edits=edits,
                other=other,
                taps=tap or None,
                top=top,
                tolerance=tolerance,
                batch_size=batch,
            )
    if not as_json:
        show_report(result)
    elif isinstance(result, Diff):
        show_json({**asdict(result), "first_diverging": result.first_diverging})
    else:
        show_json(result)
    if plot:
        result.plot(plot, all_rows=plot_all)
