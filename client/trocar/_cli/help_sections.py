"""Help in sections: commands by purpose; options of the connection apart from a command's own.

Typer draws its help panels (`rich_help_panel`) only with markup, which would read `[0]` of a selector as a
style. These classes write the same panels as plain text, and summaries of commands in full, however long.
"""

from collections.abc import Iterable
from typing import Any

from typer.core import TyperCommand, TyperGroup

from trocar._cli.usage_errors import plain_metavar

INSPECT = "Look inside a model"
ANALYSE = "Analyse"
TRAIN = "Train; data and edits on the server"
OPERATE = "Serve and operate"
CONNECT = "Connection"
DEMONSTRATE = "Demonstrations"
SECTIONS = (INSPECT, ANALYSE, TRAIN, OPERATE, CONNECT, DEMONSTRATE)
"""Sections of `trocar --help`, in order."""


class SectionedGroup(TyperGroup):
    """Group whose help lists commands by section."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line, with plain names."""
        return [plain_metavar(piece) for piece in super().collect_usage_pieces(ctx)]

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a list of commands for each section; those without one come first."""
        sections: dict[str, list[tuple[str, str]]] = {"": [], **{title: [] for title in SECTIONS}}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                title = _title(command)
                sections.setdefault(title, []).append((name, summary(command.help or "")))
        for title, rows in sections.items():
            _write(formatter, title or "Commands", rows, longest=_longest(sections.values()))


class SectionedCommand(TyperCommand):
    """Command whose help lists options by section."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line, with plain names."""
        return [plain_metavar(piece) for piece in super().collect_usage_pieces(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse; while a shell completes, without the option whose value is being typed.

        An option without its value ends the parsing, and what completes the value would not see the others.
        """
        is_open = ctx.resilient_parsing and args and args[-1].startswith("--") and "=" not in args[-1]
        return super().parse_args(ctx, args[:-1] if is_open else args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, the command's own options, then a list of options for each other section."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                is_argument = parameter.param_type_name == "argument"
                title = "Arguments" if is_argument else _title(parameter) or "Options"
                name, text = record
                name = name.partition(" <")[0] if is_argument else name  # Typer adds the Python type
                name = plain_metavar(name)
                sections.setdefault(title, []).append((name, text))
        for title, rows in sections.items():
            _write(formatter, title, rows, longest=0)


def summary(text: str) -> str:
    """Return the first paragraph of a help text in one line."""
    return " ".join(text.strip().partition("\n\n")[0].split())


def _title(described: Any) -> str:
    title = getattr(described, "rich_help_panel", None)
    return title if isinstance(title, str) else ""


def _longest(sections: Iterable[list[tuple[str, str]]]) -> int:
    return max((len(name) for rows in sections for name, _ in rows), default=0)


def _write(formatter: Any, title: str, rows: list[tuple[str, str]], *, longest: int) -> None:
    """Write a definition list; with `longest`, columns of several lists begin at the same place."""
    if rows:
        with formatter.section(title):
            formatter.write_dl([(name.ljust(longest), text) for name, text in rows])
