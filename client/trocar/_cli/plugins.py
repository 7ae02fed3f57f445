"""Plugins: commands of other packages, as the server's `serve`, `convert` and `token`.

They are found by name through the entry-point group `trocar.commands` and imported only when they are
called: the client never imports the server, and starts without it.
"""

from importlib.metadata import EntryPoint, entry_points

import typer

from trocar._cli.failures import FAILED, USAGE, fail, show_failure
from trocar._cli.help_sections import OPERATE
from trocar_api.reasons import ErrorReason

GROUP = "trocar.commands"

_HELP = {
    "serve": "Host models and serve clients until stopped.",
    "convert": "Convert a .pth state dict to a .safetensors file.",
    "token": "Create, list and revoke the tokens of a server.",
    "doctor": "Check the machine, the configuration and a running server.",
    "cluster": "Look at a deployment on Ray, scale it and stop it.",
}
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def add_plugins(app: typer.Typer) -> None:
    """Add every command of the entry-point group, without importing it."""
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        _add(app, entry)


def plugin_app(entry: EntryPoint) -> typer.Typer:
    """Import a command and wrap it in an app; a group of commands is one already.

    Raises:
        ImportError: Something that it needs is not installed.
    """
    command = entry.load()
    if isinstance(command, typer.Typer):
        return command
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command()(command)
    return app


def _add(app: typer.Typer, entry: EntryPoint) -> None:
    def run(context: typer.Context) -> None:
        try:
            # Otherwise typer prints usage errors itself, as text, and exits.
            code = plugin_app(entry)(context.args, prog_name=f"trocar {entry.name}", standalone_mode=False)
        except ModuleNotFoundError as error:
            advice = (
                f"`trocar {entry.name}` needs the server, and {error.name!r} is not installed: "
                'pip install "trocar[server]"'
            )
            if "--help" not in context.args:
                fail(advice, USAGE)
            typer.echo(f"{help_text}\n\n{advice}")
            code = 0
        except ImportError as error:  # the server says why it does not run here
            fail(f"`trocar {entry.name}`: {error}", USAGE)
        except Exception as error:
            # The server's errors have a reason; their class is not imported here.
            if not isinstance(getattr(error, "reason", None), ErrorReason):
                raise
            show_failure(error, FAILED)
            code = FAILED
        raise typer.Exit(code if isinstance(code, int) else 0)

    help_text = _HELP.get(entry.name, f"From {entry.value}.")
    section = OPERATE if entry.name in _HELP else None
    app.command(entry.name, help=help_text, context_settings=_PASS_ON, rich_help_panel=section)(run)
