"""`trocar plan`: what a request would return and need."""

from typing import Annotated

import typer

from trocar import Client
from trocar._cli.arguments import AsJson, ModelId, Taps, parse_shape
from trocar._cli.edit_options import EditTexts, parse_edits
from trocar._cli.output import shape_text, show, show_json, size_text, table


def plan(
    client: Client,
    model_id: ModelId,
    tap: Taps,
    input_shape: Annotated[
        str | None,
        typer.Option("--input", metavar="SHAPE", help="The input to assume, batch included: 8,3,224,224."),
    ] = None,
    edit: EditTexts = None,
    as_json: AsJson = False,
) -> None:
    """Show what extract would return: names, shapes, bytes, memory. Nothing is computed."""
    found = client.plan(model_id, parse_shape(input_shape), tap, edits=parse_edits(edit))
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
        typer.echo("shapes come from a pass on example data; other data may give others")
