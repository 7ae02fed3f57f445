"""The `trocar` command: which commands there are, and how a failure ends."""

import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

import trocar
from trocar._cli.bench import bench
from trocar._cli.cam import cam
from trocar._cli.cka import cka
from trocar._cli.connection import connected
from trocar._cli.datasets import datasets_app
from trocar._cli.dead import dead
from trocar._cli.demo.command import demo
from trocar._cli.demo.training import demo_train
from trocar._cli.diff import diff
from trocar._cli.edits import edits_app
from trocar._cli.extract import extract
from trocar._cli.failures import exit_code, failure_text
from trocar._cli.fid import fid
from trocar._cli.gradients import gradients
from trocar._cli.health import health
from trocar._cli.loading import load, unload
from trocar._cli.many_values import ManyValues
from trocar._cli.models import models
from trocar._cli.modules import modules
from trocar._cli.operating import drain, reload
from trocar._cli.plan import plan
from trocar._cli.plugins import add_plugins
from trocar._cli.ready import ready
from trocar._cli.stats import stats
from trocar._cli.train import train
from trocar._cli.trainers import trainers_app

_EPILOG = (
    "Exit codes: 0 done; 1 the call failed, the reason is on stderr; 2 the command line is wrong or an "
    "extra is not installed; 3 no server answers."
)

_COMMANDS: tuple[Callable[..., None], ...] = (
    *(ready, models, load, unload, modules, plan, extract, stats, gradients, cam, health),
    *(fid, cka, dead, diff, bench, drain, reload),
)
"""Those that begin with a client, in the order of the help."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Args:
        arguments: What follows `trocar`; the process's own arguments when None.

    Raises:
        SystemExit: Always, with a code of `failures`.
    """
    try:
        build_app()(arguments, prog_name="trocar")
    except (trocar.TrocarError, OSError) as error:
        typer.echo(failure_text(error), err=True)
        sys.exit(exit_code(error))


def build_app() -> typer.Typer:
    """Put the commands together."""
    app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, epilog=_EPILOG)
    app.callback(epilog=_EPILOG)(_root)
    for command in _COMMANDS:
        app.command(epilog=_EPILOG)(connected(command))
    app.command("train", cls=ManyValues, epilog=_EPILOG)(connected(train))
    app.add_typer(trainers_app(_EPILOG), name="trainers")
    app.add_typer(edits_app(_EPILOG), name="edits")
    app.add_typer(datasets_app(_EPILOG), name="datasets")
    app.command(epilog=_EPILOG)(demo)
    app.command("demo-train", epilog=_EPILOG)(demo_train)
    add_plugins(app)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trocar {trocar.__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Look inside hosted PyTorch models: list them, list their modules, extract what modules compute."""
