"""`trocar datasets`: data sets stored on the server for training."""

from typing import Annotated

import typer

from trocar import Client
from trocar._cli.console import plain, show, show_json, table
from trocar._cli.help_sections import SectionedCommand, SectionedGroup
from trocar._cli.options.arguments import AsJson
from trocar._cli.options.connection_options import connected
from trocar._cli.runs.uploading import bars, refused_sources
from trocar._wire.stored_datasets import DATASET_COLUMNS, StoredDataset

DatasetId = Annotated[str, typer.Argument(metavar="ID", help="The id of a data set.")]


def datasets_app(epilog: str) -> typer.Typer:
    """Make the group of commands."""
    app = typer.Typer(
        cls=SectionedGroup,
        no_args_is_help=True,
        rich_markup_mode=None,
        epilog=epilog,
        help="Store data sets on the server; each caller sees only its own.",
    )
    for name, command in (("list", list_datasets), ("upload", upload), ("remove", remove)):
        app.command(name, cls=SectionedCommand, epilog=epilog)(connected(command))
    return app


def list_datasets(client: Client, as_json: AsJson = False) -> None:
    """List the operator's data sets and your own."""
    datasets = client.datasets()
    if as_json:
        show_json([_plain(dataset) for dataset in datasets])
        return
    if not datasets:
        typer.echo("there are no data sets; `trocar datasets upload` stores one")
        return
    rows = table(*DATASET_COLUMNS, right=("samples", "size"))
    for dataset in datasets:
        rows.add_row(*(text(dataset) for text in DATASET_COLUMNS.values()))
    show(rows)


def upload(
    client: Client,
    source: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A folder with one folder of images for each class, a .npz file with inputs and targets, a "
            ".csv, .jsonl or .parquet file with text and label, torch:module:name or hf:name:split:column.",
        ),
    ],
    *,
    name: Annotated[
        str, typer.Option(metavar="NAME", help="Name of the data set. Default: derived from PATH.")
    ] = "",
    target: Annotated[
        list[str] | None,
        typer.Option(
            "--target", metavar="COLUMN", help="Target column, of a table or with hf:; repeat for more."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Upload a data set, or resume an interrupted upload."""
    with bars() as shown, refused_sources():
        dataset = client.upload_dataset(source, targets=target or None, name=name, progress=shown.show_upload)
    show_json(_plain(dataset)) if as_json else typer.echo(str(dataset))


def remove(client: Client, dataset_id: DatasetId) -> None:
    """Delete a data set, or end an upload."""
    client.delete_dataset(dataset_id)
    typer.echo(f"removed {dataset_id}")


def _plain(dataset: StoredDataset) -> object:
    stored_at = dataset.stored_at
    return {**plain(vars(dataset)), "stored_at": None if stored_at is None else stored_at.isoformat()}
