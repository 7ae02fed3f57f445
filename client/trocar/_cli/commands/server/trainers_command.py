"""`trocar trainers`: trainers on the server."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trocar import Client
from trocar._base.tables import size_text
from trocar._cli.console import show, show_json, table
from trocar._cli.help_sections import SectionedCommand, SectionedGroup
from trocar._cli.options.arguments import AsJson
from trocar._cli.options.connection_options import connected
from trocar._cli.runs.fit_run import Results, follow
from trocar._result.trainer_types import TRAINER_COLUMNS

TrainerId = Annotated[str, typer.Argument(metavar="TRAINER", help="The id of one of your trainers.")]


def trainers_app(epilog: str) -> typer.Typer:
    """Make the group of commands."""
    app = typer.Typer(
        cls=SectionedGroup,
        no_args_is_help=True,
        rich_markup_mode=None,
        epilog=epilog,
        help="List, watch, export, publish and close your trainers.",
    )
    commands = (("list", list_trainers), ("show", show_trainer), ("watch", watch), ("pause", pause))
    results = (("export", export), ("publish", publish), ("unpublish", unpublish), ("close", close))
    for name, command in (*commands, ("resume", resume), ("cancel", cancel), *results):
        app.command(name, cls=SectionedCommand, epilog=epilog)(connected(command))
    return app


def list_trainers(client: Client, as_json: AsJson = False) -> None:
    """List your trainers, oldest first."""
    trainers = client.trainers()
    if as_json:
        times = ("created_at", "expires_at")
        show_json([{**asdict(t), **{name: getattr(t, name).isoformat() for name in times}} for t in trainers])
        return
    rows = table(*TRAINER_COLUMNS, right=("updates", "memory"))
    for trainer in trainers:
        rows.add_row(*(text(trainer) for text in TRAINER_COLUMNS.values()))
    unreadable = [trainer for trainer in trainers if trainer.problem]
    show(rows) if trainers else typer.echo("you have no trainers; `trocar train` creates one")
    for trainer in unreadable:
        typer.echo(f"{trainer.trainer_id} cannot be read: {trainer.problem_reason}: {trainer.problem}")


def show_trainer(client: Client, trainer_id: TrainerId) -> None:
    """Show a trainer and its checkpoints."""
    trainer = client.trainer(trainer_id)
    typer.echo(str(trainer.info()))
    for saved in trainer.checkpoints():
        if saved.problem:
            typer.echo(f"  checkpoint {saved.number}  cannot be restored: {saved.problem}")
            continue
        typer.echo(
            f"  checkpoint {saved.number}  update {saved.update_count}, {size_text(saved.byte_count)}, "
            f"{saved.created_at:%Y-%m-%d %H:%M} UTC  {saved.note}".rstrip()
        )


def watch(client: Client, trainer_id: TrainerId) -> None:
    """Follow the newest fit of a trainer; stopping this does not stop it."""
    typer.echo(follow(client.trainer(trainer_id), None, Results()).outcome)


def pause(client: Client, trainer_id: TrainerId) -> None:
    """Pause a fit after the current batch."""
    typer.echo(client.trainer(trainer_id).pause())


def resume(client: Client, trainer_id: TrainerId) -> None:
    """Resume a paused fit."""
    typer.echo(client.trainer(trainer_id).resume())


def cancel(client: Client, trainer_id: TrainerId) -> None:
    """End a fit; the weights stay as they are."""
    typer.echo(client.trainer(trainer_id).cancel())


def export(
    client: Client,
    trainer_id: TrainerId,
    path: Annotated[Path, typer.Argument(metavar="FILE", dir_okay=False, help="A .safetensors file.")],
    optimizer: Annotated[bool, typer.Option("--optimizer", help="Include the optimizer's state.")] = False,
) -> None:
    """Save the weights of a trainer."""
    client.trainer(trainer_id).export(path, optimizer=optimizer)
    typer.echo(f"wrote {path} ({size_text(path.stat().st_size)})")


def publish(
    client: Client,
    trainer_id: TrainerId,
    model_id: Annotated[str, typer.Argument(metavar="ID", help="The id of the new model.")],
    classes_of: Annotated[
        str | None,
        typer.Option(metavar="DATASET", help="Id of a data set whose classes name those of the model."),
    ] = None,
) -> None:
    """Publish a copy of a trainer's weights as a hosted model."""
    categories = client.dataset(classes_of).categories if classes_of else ()
    typer.echo(f"published {client.trainer(trainer_id).publish(model_id, categories=categories)}")


def unpublish(
    client: Client,
    model_id: Annotated[str, typer.Argument(metavar="ID", help="The id of a model that you published.")],
) -> None:
    """Remove a model that you published."""
    client.unpublish(model_id)
    typer.echo(f"removed {model_id}")


def close(client: Client, trainer_id: TrainerId) -> None:
    """Close a trainer and delete its checkpoints."""
    client.trainer(trainer_id).close()
    typer.echo(f"closed {trainer_id}")
