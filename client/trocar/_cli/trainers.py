"""`trocar trainers`: what trains on the server."""

from dataclasses import asdict
from typing import Annotated

import typer

from trocar import Client
from trocar._cli.arguments import AsJson
from trocar._cli.connection import connected
from trocar._cli.output import show, show_json, size_text, table
from trocar._cli.train import tell

TrainerId = Annotated[str, typer.Argument(metavar="TRAINER", help="The id of one of your trainers.")]


def trainers_app(epilog: str) -> typer.Typer:
    """Make the group of commands."""
    app = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,
        epilog=epilog,
        help="See, watch and close your trainers.",
    )
    commands = (("list", list_trainers), ("watch", watch), ("pause", pause), ("resume", resume))
    for name, command in (*commands, ("cancel", cancel), ("close", close)):
        app.command(name, epilog=epilog)(connected(command))
    return app


def list_trainers(client: Client, as_json: AsJson = False) -> None:
    """List your trainers, oldest first."""
    found = client.trainers()
    if as_json:
        times = ("created_at", "expires_at")
        show_json([{**asdict(t), **{name: getattr(t, name).isoformat() for name in times}} for t in found])
        return
    rows = table("trainer", "model", "state", "updates", "trains", "memory", right=("updates", "memory"))
    for trainer in found:
        rows.add_row(
            trainer.trainer_id,
            trainer.model_id,
            trainer.state,
            str(trainer.update_count),
            f"{trainer.trainable_element_count:,} weights",
            size_text(trainer.byte_count),
        )
    show(rows) if found else typer.echo("you have no trainers; `trocar train` makes one")


def watch(client: Client, trainer_id: TrainerId) -> None:
    """Follow the newest fit of a trainer to its end."""
    for event in client.trainer(trainer_id).watch():
        tell(event)
    typer.echo(event.kind)


def pause(client: Client, trainer_id: TrainerId) -> None:
    """Pause a fit after the present batch."""
    typer.echo(client.trainer(trainer_id).pause())


def resume(client: Client, trainer_id: TrainerId) -> None:
    """Let a paused fit go on."""
    typer.echo(client.trainer(trainer_id).resume())


def cancel(client: Client, trainer_id: TrainerId) -> None:
    """End a fit; the weights stay as they are."""
    typer.echo(client.trainer(trainer_id).cancel())


def close(client: Client, trainer_id: TrainerId) -> None:
    """Close a trainer and delete its checkpoints."""
    client.trainer(trainer_id).close()
    typer.echo(f"closed {trainer_id}")
