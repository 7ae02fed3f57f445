"""Commands of other packages: the server's `serve`, `convert` and `token`.

They are found by name through the entry-point group `trocar.commands` and imported only when they are
called: the client never imports the server, and starts without it.
"""

from importlib.metadata import EntryPoint, entry_points

import typer

from trocar._cli.failures import USAGE, fail

GROUP = "trocar.commands"

_HELP = {
    "serve": "Host models and answer clients until stopped.",
    "convert": "Turn a .pth state dict into a .safetensors file.",
    "token": "Make, list and revoke the tokens of a server.",
    "doctor": "Check the machine, the configuration and a running server, and say what to do.",
}
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def add_plugins(app: typer.Typer) -> None:
    """Add every command of the entry-point group, without importing it."""
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        _add(app, entry)


def plugin_app(entry: EntryPoint) -> typer.Typer:
    """Import a command and make an app of its own of it; a group of commands is one already.

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
            plugin_app(entry)(context.args, prog_name=f"trocar {entry.name}")
        except ModuleNotFoundError as error:
            advice = (
                f"`trocar {entry.name}` needs the server, and {error.name!r} is not installed: "
                'pip install "trocar[server]"'
            )
            if "--help" not in context.args:
                fail(advice, USAGE)
            typer.echo(f"{help_text}\n\n{advice}")

    help_text = _HELP.get(entry.name, f"From {entry.value}.")
    app.command(entry.name, help=help_text, context_settings=_PASS_ON)(run)
