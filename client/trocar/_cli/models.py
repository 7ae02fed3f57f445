"""`trocar models`: what the server hosts."""

from typing import Annotated

import typer
from rich.table import Table

from trocar import Client, Model
from trocar._cli.arguments import AsJson
from trocar._cli.output import show, show_json, size_text, table


def models(
    client: Client,
    model_id: Annotated[str | None, typer.Argument(metavar="MODEL", help="Show this one in full.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the hosted models, or show one."""
    if model_id is not None:
        model = client.model(model_id)
        show_json(model) if as_json else show(_details(model))
        return
    found = client.models()
    show_json(found) if as_json else show(_overview(found))


def _overview(found: list[Model]) -> Table:
    columns = ("model", "state", "family", "weights", "parameters", "memory", "device")
    rows = table(*columns, right=("parameters", "memory"))
    for model in found:
        loaded = model.is_loaded
        rows.add_row(
            model.model_id,
            model.state,
            model.family,
            model.weights,
            f"{model.parameter_count:,}" if loaded else "",
            size_text(model.byte_count) if loaded else "",
            model.device,
        )
    return rows


def _details(model: Model) -> Table:
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="bold")
    rows.add_column(overflow="fold")
    for label, text in _facts(model):
        if text:
            rows.add_row(label, text)
    return rows


def _facts(model: Model) -> list[tuple[str, str]]:
    preprocessing = model.preprocessing
    return [
        ("model", model.model_id),
        ("state", model.state),
        ("error", model.error_message),
        ("family", model.family),
        ("architecture", model.architecture),
        ("weights", model.weights),
        ("parameters", f"{model.parameter_count:,}" if model.is_loaded else ""),
        ("memory", size_text(model.byte_count) if model.is_loaded else ""),
        ("device", model.device),
        ("dtype", model.dtype or ""),
        ("input", f"(batch, {', '.join(map(str, model.input_shape))})"),
        ("images", preprocessing.description if preprocessing else "none: the model takes arrays only"),
        ("categories", _categories(model)),
    ]


def _categories(model: Model) -> str:
    names = model.categories
    more = f", ... ({len(names)} in all; --json lists them)" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
