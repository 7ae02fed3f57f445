"""Plugins: commands of other packages, as the server's `serve`, `convert` and `token`.

They are found by name through the entry-point group `trocar.commands` and imported only when they are
called: the client never imports the server, and starts without it.
"""

from importlib.metadata import EntryPoint, entry_points

import typer

from trocar._cli.failures import FAILED, USAGE, fail, show_failure
from trocar._cli.help_sections import OPERATE, SectionedCommand
from trocar_api.reasons import ErrorReason

GROUP = "trocar.commands"

_HELP = {
    "serve": "Host models and serve clients until stopped.",
    "convert": "Convert a .pth state dict to a .safetensors file.",
    "token": "Create, list and revoke the tokens of a server.",
    "doctor": "Check the machine, the configuration and a running server.",
    "cluster": "Look at a deployment on Ray, scale it and stop it.",
}
_ADMIN = ("convert", "token")
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def add_plugins(app: typer.Typer, admin: typer.Typer) -> None:
    """Add every command of the entry-point group, without importing it.

    Args:
        app: Gets them.
        admin: The group that gets the commands that `_ADMIN` names, instead of `app`.
    """
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        _add(admin if entry.name in _ADMIN else app, entry)


def plugin_app(entry: EntryPoint) -> typer.Typer:
    """Import a command and wrap it in an app; a group of commands is one already.

    Raises:
        ImportError: Something that it needs is not installed.
    """
    command = entry.load()
    if isinstance(command, typer.Typer):
        for registered in command.registered_commands:
            registered.cls = SectionedCommand  # the same style of help
        return command
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command(cls=SectionedCommand)(command)
    return app


def _add(app: typer.Typer, entry: EntryPoint) -> None:
    def run(context: typer.Context) -> None:
        try:
            # Otherwise typer prints usage errors itself, as text, and exits.
            code = plugin_app(entry)(context.args, prog_name=name, standalone_mode=False)
        except ModuleNotFoundError as error:
            advice = (
                f"`{name}` needs the server, and {error.name!r} is not installed: "
                'pip install "trocar[server]"'
            )
            if "--help" not in context.args:
                fail(advice, USAGE)
            typer.echo(f"{help_text}\n\n{advice}")
            code = 0
        except ImportError as error:  # the server says why it does not run here
            fail(f"`{name}`: {error}", USAGE)
        except Exception as error:
            # The server's errors have a reason; their class is not imported here.
            if not isinstance(getattr(error, "reason", None), ErrorReason):
                raise
            show_failure(error, FAILED)
            code = FAILED
        raise typer.Exit(code if isinstance(code, int) else 0)

    name = f"trocar admin {entry.name}" if entry.name in _ADMIN else f"trocar {entry.name}"
    help_text = _HELP.get(entry.name, f"From {entry.value}.")
    section = OPERATE if entry.name in _HELP and entry.name not in _ADMIN else None
    app.command(entry.name, help=help_text, context_settings=_PASS_ON, rich_help_panel=section)(run)
