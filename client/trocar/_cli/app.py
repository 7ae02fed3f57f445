"""The `trocar` command: its subcommands, and exit codes of failures."""

import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

import trocar
from trocar._cli.commands.analysis.cam_command import cam
from trocar._cli.commands.analysis.cka_command import cka
from trocar._cli.commands.analysis.compare_command import compare
from trocar._cli.commands.analysis.dead_command import dead
from trocar._cli.commands.analysis.fid_command import fid
from trocar._cli.commands.analysis.health_command import health
from trocar._cli.commands.analysis.nearest_command import nearest
from trocar._cli.commands.analysis.probe_command import probe
from trocar._cli.commands.analysis.rsa_command import rsa
from trocar._cli.commands.analysis.top_command import top
from trocar._cli.commands.inspection.extract_command import extract
from trocar._cli.commands.inspection.generate_command import generate
from trocar._cli.commands.inspection.gradients_command import gradients
from trocar._cli.commands.inspection.models_command import models
from trocar._cli.commands.inspection.modules_command import modules
from trocar._cli.commands.inspection.plan_command import plan
from trocar._cli.commands.inspection.predict_command import predict
from trocar._cli.commands.inspection.stats_command import stats
from trocar._cli.commands.inspection.steer_command import steer
from trocar._cli.commands.server.bench_command import bench
from trocar._cli.commands.server.config_command import config_app, login
from trocar._cli.commands.server.datasets_command import datasets_app
from trocar._cli.commands.server.edits_command import edits_app
from trocar._cli.commands.server.loading_commands import load, unload
from trocar._cli.commands.server.operating_commands import drain, reload
from trocar._cli.commands.server.page_command import page
from trocar._cli.commands.server.status_command import status
from trocar._cli.commands.server.train_command import train
from trocar._cli.commands.server.trainers_command import trainers_app
from trocar._cli.demo.command import demo
from trocar._cli.failures import FAILED, USAGE, exit_code, failures_of, show_failure
from trocar._cli.help_sections import (
    ANALYSE,
    CONNECT,
    DEMONSTRATE,
    INSPECT,
    OPERATE,
    TRAIN,
    SectionedCommand,
    SectionedGroup,
)
from trocar._cli.options.connection_options import connected
from trocar._cli.options.many_values import ManyValues
from trocar._cli.plugins import add_plugins
from trocar._cli.usage_errors import is_help, is_usage_error

_EPILOG = (
    "Exit codes: 0 done; 1 the call failed, the reason is on stderr; 2 the command line is wrong or an extra "
    "is not installed; 3 the server cannot be reached."
)

_COMMANDS: tuple[tuple[str, tuple[Callable[..., None], ...]], ...] = (
    (INSPECT, (models, modules, plan, predict, extract, stats, gradients, generate, steer, page)),
    (ANALYSE, (cam, compare, probe)),
    (OPERATE, (status, bench)),
)
"""Those that begin with a client, by section of the help."""

_GROUPS: tuple[tuple[str, str, str, tuple[Callable[..., None], ...]], ...] = (
    (
        ANALYSE,
        "analyse",
        "Analyse a model over a set of inputs.",
        (health, fid, cka, rsa, dead, nearest, top),
    ),
    (
        OPERATE,
        "admin",
        "Load models, drain and reload a server, manage its tokens.",
        (load, unload, drain, reload),
    ),
)
"""Groups of such commands: section, name, help, commands."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit.

    Args:
        arguments: What follows `trocar`; the process's own arguments when None.

    Raises:
        SystemExit: Always, with a code of `failures`.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    with failures_of(words):
        sys.exit(_run(words))


def _run(words: list[str]) -> int:
    """Run the command line and return its exit code; failures are shown."""
    try:
        # Otherwise typer prints usage errors itself, in its own words, and exits.
        code = build_app()(words, prog_name="trocar", standalone_mode=False)
    except (trocar.TrocarError, OSError) as error:
        code = exit_code(error)
        show_failure(error, code)
    except typer.Abort:
        code = FAILED
        typer.echo("stopped", err=True)
    except Exception as error:
        if not is_usage_error(error):
            raise
        code = USAGE
        if is_help(error):
            typer.echo(str(error), err=True)
        else:
            show_failure(error, code)
    return code if isinstance(code, int) else 0


def build_app() -> typer.Typer:
    """Assemble the app from its commands."""
    app = typer.Typer(cls=SectionedGroup, no_args_is_help=True, rich_markup_mode=None, epilog=_EPILOG)
    app.callback(epilog=_EPILOG)(_root)
    for section, commands in _COMMANDS:
        for command in commands:
            _add(app, section)(connected(command))
    groups = {name: _group(app, section, name, text) for section, name, text, _ in _GROUPS}
    for _, name, _, commands in _GROUPS:
        for command in commands:
            _add(groups[name])(connected(command))
    _add(app, TRAIN, "train", ManyValues)(connected(train))
    for name, group in (("trainers", trainers_app), ("datasets", datasets_app), ("edits", edits_app)):
        app.add_typer(group(_EPILOG), name=name, rich_help_panel=TRAIN)
    _add(app, CONNECT)(login)
    app.add_typer(config_app(_EPILOG), name="config", rich_help_panel=CONNECT)
    _add(app, DEMONSTRATE)(demo)
    add_plugins(app, groups["admin"])
    return app


def _group(app: typer.Typer, section: str, name: str, text: str) -> typer.Typer:
    group = typer.Typer(
        cls=SectionedGroup, no_args_is_help=True, rich_markup_mode=None, epilog=_EPILOG, help=text
    )
    app.add_typer(group, name=name, rich_help_panel=section)
    return group


def _add(
    app: typer.Typer,
    section: str = "",
    name: str | None = None,
    kind: type[SectionedCommand] = SectionedCommand,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return what adds a function as a command in a section of the help."""
    return app.command(name, cls=kind, epilog=_EPILOG, rich_help_panel=section)


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
    """Look inside PyTorch models on a server: list modules, extract, edit, take gradients, fine-tune."""
