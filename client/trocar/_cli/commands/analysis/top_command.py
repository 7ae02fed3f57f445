"""`trocar analyse top`: the images that drive channels most."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from trocar import Client
from trocar._analysis.top_inputs.top_inputs import WIDEN
from trocar._cli.console import show_json, show_report
from trocar._cli.failures import refuse
from trocar._cli.options.arguments import AsJson, BatchSize, ModelId
from trocar._cli.options.completion import complete_modules
from trocar._cli.options.execution_options import FlagTexts, parse_flags
from trocar._cli.options.input_sets import IMAGES_HELP, Plot, analysing, check_plot, read_set
from trocar._cli.options.tables import TableFile, check_table
from trocar._cli.options.text_options import TextFile, TextsOption, read_texts
from trocar._request.inputs import with_flags
from trocar._request.texts import texts


def top(  # noqa: PLR0913 - one parameter for each option
    client: Client,
    model_id: ModelId,
    *,
    images: Annotated[list[str] | None, typer.Argument(metavar="[IMAGES]...", help=IMAGES_HELP)] = None,
    at: Annotated[
        str,
        typer.Option(metavar="SELECTOR", autocompletion=complete_modules, help="Place of the channels."),
    ],
    text: TextsOption = None,
    text_file: TextFile = None,
    channel: Annotated[
        list[int] | None,
        typer.Option(metavar="NUMBER", min=0, help="Channel, from 0; repeat for more. Default: all."),
    ] = None,
    k: Annotated[int, typer.Option("-k", metavar="NUMBER", min=1, help="Images for each channel.")] = 9,
    mean: Annotated[
        bool, typer.Option("--mean", help="Rank by the mean over positions, not by the largest value.")
    ] = False,
    plot: Plot = None,
    widen: Annotated[
        float,
        typer.Option(metavar="FACTOR", min=0.1, help="Width of a crop, in cells of the feature map."),
    ] = WIDEN,
    whole: Annotated[
        bool, typer.Option("--whole", help="Draw whole images, with a frame around the crop.")
    ] = False,
    out: TableFile = None,
    flag: FlagTexts = None,
    batch: BatchSize = 16,
    as_json: AsJson = False,
) -> None:
    """Print the images or texts with the largest values of channels, and where in them.

    With --plot, a picture of the crops around these places, or of the tokens.
    """
    check_plot(plot)
    check_table(out)
    flags, sentences = parse_flags(flag), read_texts(text, text_file)
    if bool(sentences) == bool(images):
        refuse("name either IMAGES or texts: --text TEXT or --text-file FILE")
    sets = {model_id: read_set(client, model_id, images)} if images else {}
    with analysing(batch, flags, **sets) as listed:
        inputs: Any = listed[0] if listed else with_flags(texts(sentences), flags)
        result = client.top_inputs(model_id, inputs, at, channel or None, k, by="mean" if mean else "max")
    if as_json:
        rows = zip(result.channels, result, strict=True)
        show_json({channel: [asdict(one) for one in row] for channel, row in rows})
    else:
        show_report(result)
    if plot:
        result.plot(plot, widen=widen, whole=whole)
    if out:
        result.save(out)
