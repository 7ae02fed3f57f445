"""`trocar models`: the server's catalogue, with the state of each model."""

from typing import Annotated

import typer
from rich.table import Table

from trocar import Client, Model
from trocar._base.types import MODEL_COLUMNS, model_facts
from trocar._cli.console import Rows, show, show_json, table
from trocar._cli.options.arguments import AsJson
from trocar._cli.options.completion import complete_models


def models(
    client: Client,
    model_id: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            autocompletion=complete_models,
            help="Show all details of this model.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the hosted models, or show one."""
    if model_id is not None:
        model = client.model(model_id)
        show_json(model) if as_json else show(_details(model))
        return
    result = client.models()
    show_json(result) if as_json else show(_overview(result))


def _overview(outcome: list[Model]) -> Rows:
    columns = dict(MODEL_COLUMNS)
    if not any(model.error_message for model in outcome):
        del columns["error"]
    rows = table(*columns, right=("parameters", "memory"))
    for model in outcome:
        rows.add_row(*(text(model) for text in columns.values()))
    return rows


def _details(model: Model) -> Table:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold")
    rows.add_column(overflow="fold")
    for label, text in model_facts(model).items():
        rows.add_row(label, text)
    return rows
