from importlib.metadata import EntryPoint

import pytest
import typer

from trocar._cli import plugins


def run(monkeypatch: pytest.MonkeyPatch, target: str, *arguments: str) -> int | str | None:
    entry = EntryPoint("serve", target, plugins.GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry])
    app = typer.Typer()
    app.callback()(lambda: None)
    plugins.add_plugins(app, app)
    with pytest.raises(SystemExit) as stopped:
        app(arguments, prog_name="trocar")
    return stopped.value.code


def test_command_without_its_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "a_package_that_is_not_there:serve", "serve", "resnet18", "--port", "0") == 2
    error = capsys.readouterr().err
    assert 'pip install "trocar[server]"' in error
    assert "Traceback" not in error


def test_help_of_a_command_without_its_extra_says_what_it_is_and_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "a_package_that_is_not_there:serve", "serve", "--help") == 0
    shown = capsys.readouterr().out
    assert "Host models" in shown
    assert 'pip install "trocar[server]"' in shown


def test_command_is_listed_without_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "a_package_that_is_not_there:serve", "--help") == 0
    assert "serve" in capsys.readouterr().out


def _greet(name: str, loud: bool = False) -> None:
    """Say hello."""
    typer.echo(f"hello {name.upper() if loud else name}")


def test_a_group_of_commands_is_added_as_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group = typer.Typer(no_args_is_help=True)
    group.command("hello")(_greet)
    group.command("bye")(lambda: typer.echo("bye"))
    monkeypatch.setattr(EntryPoint, "load", lambda entry: group)
    assert run(monkeypatch, "x:y", "serve", "hello", "cat") == 0
    assert run(monkeypatch, "x:y", "serve", "bye") == 0
    assert capsys.readouterr().out == "hello cat\nbye\n"


def test_command_gets_its_own_arguments_options_and_help(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = f"{__name__}:_greet"
    monkeypatch.setattr(EntryPoint, "load", lambda entry: _greet)
    assert run(monkeypatch, target, "serve", "cat", "--loud") == 0
    assert capsys.readouterr().out == "hello CAT\n"
    assert run(monkeypatch, target, "serve", "--help") == 0
    assert "--loud" in capsys.readouterr().out
