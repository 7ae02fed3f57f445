"""Command lines that are written down somewhere: parsed as `trocar` would, and not run."""

from importlib.metadata import entry_points
from typing import Any

import typer

from trocar._cli.app import build_app
from trocar._cli.plugins import GROUP, plugin_app


def parse(words: list[str]) -> None:
    """Parse a command line, options and all, without running it."""
    plugins = {entry.name: entry for entry in entry_points(group=GROUP)}
    root: Any = typer.main.get_command(build_app())
    if not words or words[0].startswith("-"):
        assert all(
            word in [option for p in root.params for option in p.opts] or word == "--help" for word in words
        )
        return
    name, *arguments = words
    if name in plugins:
        command: Any = typer.main.get_command(plugin_app(plugins[name]))
    else:
        command = root.commands[name]
    if arguments and arguments[0] in getattr(command, "commands", {}):  # of a group
        name, *arguments = arguments
        command = command.commands[name]
    command.make_context(name, arguments)
