"""Help texts: every command in a section, summaries in full, and metavars that say what is meant."""

import re
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

import pytest
import typer

from trocar._cli.app import build_app
from trocar._cli.help_sections import CONNECT, SECTIONS, summary
from trocar._cli.plugins import GROUP, plugin_app
from trocar._cli.usage_errors import plain_metavar

ROOT: Any = typer.main.get_command(build_app())


def commands(group: Any = ROOT, name: str = "trocar") -> Iterator[tuple[str, Any]]:
    for child, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{name} {child}")
        else:
            yield f"{name} {child}", command


def commands_of_the_server() -> Iterator[tuple[str, Any]]:
    for entry in entry_points(group=GROUP):
        command: Any = typer.main.get_command(plugin_app(entry))
        name = f"trocar {entry.name}"
        yield from commands(command, name) if hasattr(command, "commands") else [(name, command)]


COMMANDS = {**dict(commands()), **dict(commands_of_the_server())}


def help_of(command: Any, name: str) -> str:
    return str(command.make_context(name, [], resilient_parsing=True).get_help())


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_summaries_of_commands_are_not_cut_off(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = help_of(ROOT, "trocar")
    words = " ".join(shown.split())
    for name, command in ROOT.commands.items():
        assert f"{name} {summary(command.help)}" in words
    assert max(map(len, shown.splitlines())) <= columns


@pytest.mark.parametrize("name", COMMANDS)
def test_summary_is_a_sentence(name: str) -> None:
    found = summary(COMMANDS[name].help)
    assert found[0].isupper()
    assert found.endswith(".")


def test_commands_are_in_sections_in_order() -> None:
    lines = help_of(ROOT, "trocar").splitlines()
    titles = [line.removesuffix(":") for line in lines if re.fullmatch(r"\S.*:", line)]
    assert titles == ["Options", *SECTIONS]


def test_there_are_few_commands() -> None:
    assert len(ROOT.commands) <= 27


def test_options_of_the_connection_are_apart() -> None:
    own, _, connection = help_of(COMMANDS["trocar cam"], "cam").partition(f"\n{CONNECT}:\n")
    assert "--server ADDRESS" not in own
    assert "--server ADDRESS" in connection
    assert "--method METHOD" in own


@pytest.mark.parametrize("name", COMMANDS)
def test_metavars_say_what_is_meant(name: str) -> None:
    shown = help_of(COMMANDS[name], name)
    assert re.findall(r"[<{]\S[^>}\n]*[>}]|\[\[", shown) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_metavars_are_in_capitals_or_list_what_can_be_chosen(name: str) -> None:
    for parameter in COMMANDS[name].params:
        if parameter.param_type_name == "argument" or not (parameter.is_flag or parameter.count):
            shown = parameter.metavar or plain_metavar(parameter.display_type(None))
            assert shown == shown.upper() or re.fullmatch(r"\w+(\|\w+)+", shown), f"{parameter.name}: {shown}"


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_options_is_a_sentence(name: str) -> None:
    for parameter in COMMANDS[name].params:
        text = parameter.help or ""
        assert text.endswith(".") or not text, f"{parameter.name}: {text}"
