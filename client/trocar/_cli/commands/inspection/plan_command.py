"""`trocar plan`: dry run of a request, with its outputs and resources."""

from typing import Annotated

import typer

from trocar import Client
from trocar._base.tables import size_text
from trocar._cli.console import shape_text, show, show_json, table
from trocar._cli.options.arguments import AsJson, ModelId, Taps, parse_shape
from trocar._cli.options.edit_options import EditTexts, parse_edits
from trocar._cli.options.execution_options import AdapterOption


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
    as_json: AsJson = False,
) -> None:
    """Show what extract would return, without computing it."""
    found = client.plan(model_id, parse_shape(input_shape), tap, edits=parse_edits(edit), adapter=adapter)
    if as_json:
        show_json(found)
        return
    rows = table("feature map", "shape", "dtype", "size", right=("size",))
    for name, entry in found.feature_maps.items():
        rows.add_row(name, shape_text(entry.shape), entry.dtype, size_text(entry.byte_count))
    show(rows)
    for selector, names in found.edit_expansions.items():
        typer.echo(f"edits {selector}: {', '.join(names)}")
    typer.echo(f"reply {size_text(found.reply_bytes)}, memory about {size_text(found.memory_bytes)}")
    end = f"stops after {found.stopped_at}" if found.stopped_at else "runs to its end"
    typer.echo(f"the pass {end}")
    if not found.is_symbolic:
        typer.echo("shapes are those of a pass on example data; other data may give other shapes")
