"""`trocar gradients`: gradients at modules, inputs and parameters."""

from pathlib import Path
from typing import Annotated, Any

import typer

from trocar import Client, FeatureMaps
from trocar._base.tables import size_text
from trocar._cli.console import number_text, show, show_json
from trocar._cli.failures import refuse
from trocar._cli.options.arguments import AsJson, ModelId, check_file, parse_statistics
from trocar._cli.options.completion import complete_modules
from trocar._cli.options.edit_options import EditTexts, parse_edits
from trocar._cli.options.execution_options import AdapterOption, FlagTexts, parse_flags
from trocar._cli.options.input_sets import IMAGES_HELP
from trocar._cli.options.objective_options import Labels, Of, read_objective
from trocar._cli.options.one_pass import EditSources, EditSourceTexts, read_edit_sources, read_pass
from trocar._cli.options.text_options import TextFile, TextsOption, read_texts
from trocar._cli.runs.statistics_view import StatisticsTable, overall_table
from trocar._request.inputs import with_flags
from trocar._request.taps import tap
from trocar._request.texts import texts

_SUFFIX = ".safetensors"


def gradients(  # noqa: PLR0913 - options of a command
    client: Client,
    model_id: ModelId,
    images: Annotated[list[str] | None, typer.Argument(metavar="IMAGES", help=IMAGES_HELP)] = None,
    *,
    at: Annotated[
        list[str],
        typer.Option(
            metavar="SELECTOR",
            autocompletion=complete_modules,
            help="Selector, for example layer4, /in for the input or 'fc/param(weight)'; repeat for more.",
        ),
    ],
    text: TextsOption = None,
    text_file: TextFile = None,
    of: Of = None,
    labels: Labels = None,
    value: Annotated[
        list[str] | None,
        typer.Option(
            "--tap",
            metavar="SELECTOR",
            autocompletion=complete_modules,
            help="Selector of a value to collect as well, not its gradient; repeat for more.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Save the gradients to a .safetensors file."),
    ] = None,
    stats: Annotated[
        str, typer.Option(metavar="NAMES", help="Statistics to print.")
    ] = "l2,absmax,zero_fraction",
    edit: EditTexts = None,
    edit_source: EditSources = None,
    edit_source_text: EditSourceTexts = None,
    adapter: AdapterOption = "",
    flag: FlagTexts = None,
    as_json: AsJson = False,
) -> None:
    """Print gradients at modules, the input and parameters.

    One forward and one backward pass; all images or texts are one batch. Without --out only statistics are
    sent.
    """
    names = parse_statistics(stats)
    if not names and out is None:
        refuse("--stats: name at least one statistic, or save the gradients with --out")
    if out is not None:
        check_file(out, _SUFFIX)
    edits, flags = parse_edits(edit), parse_flags(flag)
    sentences = read_texts(text, text_file)
    if bool(sentences) == bool(images):
        refuse("name either IMAGES or texts: --text TEXT or --text-file FILE")
    given = texts(sentences) if sentences else read_pass(client, model_id, images or ())
    inputs = with_flags(given, flags)
    sources = read_edit_sources(client, model_id, edit_source, edit_source_text)
    wanted = read_objective(client, model_id, inputs, of, labels, adapter=adapter)
    places, taps = (
        [tap(selector, stats=names, values=out is not None) for selector in selectors]
        for selectors in (at, value or ())
    )
    maps = client.gradients(
        model_id,
        inputs,
        of=wanted.objective,
        at=places,
        taps=taps,
        edits=edits,
        sources=sources,
        adapter=adapter,
    )
    if out is not None:
        maps.save(out)
    statistics = StatisticsTable(names)
    statistics.add(maps)
    if as_json:
        show_json({"of": wanted.text, **_report(maps, out), "stats": statistics.values()})
        return
    show(overall_table(statistics))
    if maps.objective is not None:
        typer.echo(f"of {wanted.text} = {number_text(maps.objective)}")
    if out is not None:
        typer.echo(f"wrote {out} ({size_text(out.stat().st_size)})")


def _report(maps: FeatureMaps, out: Path | None) -> dict[str, Any]:
    return {
        "objective": maps.objective,
        "out": None if out is None else str(out),
        "shapes": {name: entry.shape for name, entry in maps.info.items()},
    }
