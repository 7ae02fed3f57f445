"""`trocar datasets`: data sets that the server keeps for training."""

from typing import Annotated

import typer

from trocar import Client
from trocar._cli.arguments import AsJson
from trocar._cli.connection import connected
from trocar._cli.output import plain, show, show_json, size_text, table
from trocar._cli.uploading import bars, refused_sources
from trocar._stored_datasets import StoredDataset

DatasetId = Annotated[str, typer.Argument(metavar="ID", help="The id of a data set.")]


def datasets_app(epilog: str) -> typer.Typer:
    """Make the group of commands."""
    app = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        epilog=epilog,
        help="Keep data sets on the server to train on; every caller has its own.",
    )
    for name, command in (("list", list_datasets), ("upload", upload), ("remove", remove)):
        app.command(name, epilog=epilog)(connected(command))
    return app


def list_datasets(client: Client, as_json: AsJson = False) -> None:
    """List the operator's data sets and your own."""
    found = client.datasets()
    if as_json:
        show_json([_plain(dataset) for dataset in found])
        return
    if not found:
        typer.echo("there are no data sets; `trocar datasets upload` stores one")
        return
    rows = table("id", "name", "samples", "inputs", "targets", "size", "state", right=("samples", "size"))
    for dataset in found:
        rows.add_row(
            dataset.dataset_id,
            dataset.name,
            f"{dataset.sample_count:,}",
            _inputs(dataset),
            ", ".join(f"{name or 'target'} {target.dtype}" for name, target in dataset.targets.items()),
            "" if dataset.is_listed else size_text(dataset.byte_count),
            "listed" if dataset.is_listed else "complete" if dataset.is_complete else "uploading",
        )
    show(rows)


def upload(
    client: Client,
    source: Annotated[
        str,
        typer.Argument(
            metavar="PATH",
            help="A folder with one folder of images for each class, a .npz file with inputs and targets, "
            "torch:module:name or hf:name:split:column.",
        ),
    ],
    *,
    name: Annotated[str, typer.Option(help="What to call it; made of PATH by default.")] = "",
    target: Annotated[
        list[str] | None, typer.Option("--target", help="A column to learn, with hf:; repeat for more.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Upload a data set; when it was interrupted, only what is missing."""
    with bars() as shown, refused_sources():
        dataset = client.upload_dataset(source, targets=target or None, name=name, progress=shown.show_upload)
    show_json(_plain(dataset)) if as_json else typer.echo(str(dataset))


def remove(client: Client, dataset_id: DatasetId) -> None:
    """Delete a data set, or end an upload."""
    client.delete_dataset(dataset_id)
    typer.echo(f"removed {dataset_id}")


def _inputs(dataset: StoredDataset) -> str:
    if dataset.has_images:
        return "images"
    return "" if dataset.inputs is None else f"{dataset.inputs.dtype} {dataset.inputs.shape}"


def _plain(dataset: StoredDataset) -> object:
    stored_at = dataset.stored_at
    return {**plain(vars(dataset)), "stored_at": None if stored_at is None else stored_at.isoformat()}
