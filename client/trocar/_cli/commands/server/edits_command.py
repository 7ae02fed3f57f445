"""`trocar edits`: named lists of edits stored on the server."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from trocar import Client
from trocar._cli.console import show_json
from trocar._cli.failures import refuse
from trocar._cli.help_sections import SectionedCommand, SectionedGroup
from trocar._cli.options.arguments import AsJson, ModelId
from trocar._cli.options.completion import complete_models
from trocar._cli.options.connection_options import connected
from trocar._cli.options.edit_options import EditTexts, parse_edits
from trocar._request.edits import Edit
from trocar._request.stored.stored_edits import StoredEdits, check_edits_name

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="Name under which the edits are stored, for `--edit NAME`.")
]


def edits_app(epilog: str) -> typer.Typer:
    """Make the group of commands."""
    app = typer.Typer(
        cls=SectionedGroup,
        no_args_is_help=True,
        rich_markup_mode=None,
        epilog=epilog,
        help="Store edits on the server; each caller sees only its own.",
    )
    for name, command in (("add", add), ("list", list_edits), ("remove", remove)):
        app.command(name, cls=SectionedCommand, epilog=epilog)(connected(command))
    return app


def add(
    client: Client,
    name: Name,
    model_id: ModelId,
    *,
    edit: EditTexts = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace stored edits of this name.")] = False,
    as_json: AsJson = False,
) -> None:
    """Store edits, after a check on the model's example input."""
    _check_name(name)
    edits = parse_edits(edit)
    if not edits:
        refuse("there is nothing to store; give at least one --edit")
    chosen = [entry for entry in edits if isinstance(entry, Edit)]
    if len(chosen) < len(edits):
        refuse("--edit: stored edits cannot refer to other stored edits")
    stored = client.store_edits(model_id, name, chosen, replace=replace)
    show_json(_plain(stored)) if as_json else typer.echo(str(stored))


def list_edits(
    client: Client,
    model_id: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            autocompletion=complete_models,
            help="Only edits for this model.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List your stored edits, by model and name."""
    stored_edits = client.stored_edits(model_id)
    if as_json:
        show_json([_plain(stored) for stored in stored_edits])
        return
    of_model = "" if model_id is None else f" for {model_id}"
    nothing = f"there are no stored edits{of_model}; `trocar edits add` stores some"
    typer.echo("\n".join(map(str, stored_edits)) or nothing)


def remove(client: Client, name: Name, model_id: ModelId) -> None:
    """Delete stored edits."""
    _check_name(name)
    client.delete_edits(model_id, name)
    typer.echo(f"removed {name} of {model_id}")


def _check_name(name: str) -> None:
    try:
        check_edits_name(name)
    except ValueError as error:
        refuse(str(error))


def _plain(stored: StoredEdits) -> dict[str, Any]:
    return {**asdict(stored), "stored_at": stored.stored_at.isoformat()}
