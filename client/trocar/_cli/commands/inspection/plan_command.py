"""`trocar plan`: dry run of a request, with its outputs and resources."""

from typing import Annotated

import typer

from trocar import Client
from trocar._base.tables import size_text
from trocar._cli.console import shape_text, show, show_json, table
from trocar._cli.options.arguments import AsJson, ModelId, Taps, parse_shape
from trocar._cli.options.edit_options import EditTexts, parse_edits
from trocar._cli.options.execution_options import AdapterOption, FlagTexts, parse_flags
from trocar._request.inputs import with_flags


def plan(
    client: Client,
    model_id: ModelId,
    tap: Taps,
    input_shape: Annotated[
        str | None,
        typer.Option(
            "--input", metavar="SHAPE", help="Assumed input shape, including the batch: 8,3,224,224."
        ),
    ] = None,
    edit: EditTexts = None,
    adapter: AdapterOption = "",
    flag: FlagTexts = None,
    as_json: AsJson = False,
) -> None:
    """Show what extract would return, without computing it."""
    inputs = with_flags(parse_shape(input_shape), parse_flags(flag))
    result = client.plan(model_id, inputs, tap, edits=parse_edits(edit), adapter=adapter)
    if as_json:
        show_json(result)
        return
    rows = table("feature map", "shape", "dtype", "size", right=("size",))
    for name, entry in result.feature_maps.items():
        rows.add_row(name, shape_text(entry.shape), entry.dtype, size_text(entry.byte_count))
    show(rows)
    for selector, names in result.edit_expansions.items():
        typer.echo(f"edits {selector}: {', '.join(names)}")
    typer.echo(f"reply {size_text(result.reply_bytes)}, memory about {size_text(result.memory_bytes)}")
    end = f"stops after {result.stopped_at}" if result.stopped_at else "runs to its end"
    typer.echo(f"the pass {end}")
    if not result.is_symbolic:
        typer.echo("shapes are those of a pass on example data; other data may give other shapes")
