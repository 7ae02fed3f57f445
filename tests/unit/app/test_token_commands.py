"""`trocar admin token`, from its arguments to the file."""

import json
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from trocar_server.app.token_commands import token_app
from trocar_server.auth import Scope, TokenFile, token_hash
from trocar_server.errors import ServiceError


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TokenFile:
    monkeypatch.setenv("TROCAR_DATA_DIR", str(tmp_path / "data"))
    return TokenFile(tmp_path / "data")


@pytest.fixture
def run(file: TokenFile, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command and return its exit code, stdout and stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        try:
            token_app(arguments, prog_name="trocar admin token")
        except ServiceError as error:  # the CLI prints it
            return 1, capsys.readouterr().out, error.message
        except SystemExit as stopped:
            shown = capsys.readouterr()
            return int(stopped.code or 0), shown.out, shown.err
        pytest.fail("the command did not exit")

    return call


def test_a_token_alone_goes_to_stdout(run: Any, file: TokenFile) -> None:
    code, token, notes = run("create", "alice", "--scope", "run", "--scope", "train")
    (grant,) = file.read()
    assert code == 0
    assert grant.token_sha256 == token_hash(token.strip())
    assert grant.scopes == frozenset({Scope.RUN, Scope.TRAIN})
    assert token.strip() not in notes


@pytest.mark.parametrize(
    ("text", "seconds"), [("12h", 43_200), ("30d", 2_592_000), ("2w", 1_209_600), (None, 7_776_000)]
)
def test_a_token_ends_as_asked_or_after_90_days(
    run: Any, file: TokenFile, text: str | None, seconds: int
) -> None:
    before_s = int(time.time())
    run("create", "alice", "--scope", "read", *(("--expires", text) if text else ()))
    (grant,) = file.read()
    assert grant.expires_at_s is not None
    assert before_s + seconds <= grant.expires_at_s <= int(time.time()) + seconds


def test_a_token_may_be_for_ever_when_that_is_typed(run: Any, file: TokenFile) -> None:
    run("create", "alice", "--scope", "read", "--expires", "never")
    assert file.read()[0].expires_at_s is None
    assert "for ever" in run("list")[1]


@pytest.mark.parametrize("text", ["", "0d", "30", "d", "-1d", "1.5d", "99999w", "30 d", "5y", "NEVER"])
def test_an_end_that_is_none_is_refused(run: Any, file: TokenFile, text: str) -> None:
    assert run("create", "alice", "--scope", "read", "--expires", text)[0] == 2
    assert file.read() == ()


@pytest.mark.parametrize(
    "arguments", [("create", "alice"), ("create", "alice", "--scope", "root"), ("create",)]
)
def test_a_token_without_a_scope_or_a_name_is_refused(
    run: Any, file: TokenFile, arguments: tuple[str, ...]
) -> None:
    assert run(*arguments)[0] == 2
    assert file.read() == ()


def test_for_a_certificate_no_token_is_made(run: Any, file: TokenFile) -> None:
    code, out, _ = run("create", "alice", "--scope", "admin", "--certificate")
    assert (code, out) == (0, "")
    assert file.read()[0].token_sha256 is None


def test_the_list_has_everything_but_secrets(run: Any, file: TokenFile) -> None:
    token = run("create", "alice", "--scope", "run", "--expires", "1h")[1].strip()
    file.add("late", [Scope.READ], expires_at_s=7, now_s=5, for_certificate=True)
    alice, late = json.loads(run("list", "--json")[1])
    assert late == {
        "id": file.read()[1].grant_id,
        "name": "late",
        "kind": "certificate",
        "scopes": ["read"],
        "created_at": "1970-01-01T00:00:05Z",
        "expires_at": "1970-01-01T00:00:07Z",
        "is_expired": True,
    }
    assert datetime.fromisoformat(alice["expires_at"]).timestamp() == file.read()[0].expires_at_s
    shown = run("list")[1] + str(alice)
    assert "expired 1970" in shown
    assert token not in shown
    assert token_hash(token) not in shown


def test_created_and_revoked_tokens_are_json_with_json(run: Any, file: TokenFile) -> None:
    created = json.loads(run("create", "alice", "--scope", "run", "--json")[1])
    assert file.read()[0].token_sha256 == token_hash(created["token"])
    assert (created["name"], created["scopes"]) == ("alice", ["run"])
    assert json.loads(run("create", "bob", "--scope", "run", "--certificate", "--json")[1])["token"] is None
    (revoked,) = json.loads(run("revoke", "alice", "--json")[1])
    assert revoked["id"] == created["id"]


def test_an_empty_list_says_so(run: Any) -> None:
    assert run("list") == (0, "there are no tokens\n", "")
    assert run("list", "--json")[1] == "[]\n"


def test_a_revoked_token_is_gone_and_one_that_is_not_there_is_an_error(run: Any, file: TokenFile) -> None:
    run("create", "alice", "--scope", "run")
    assert "alice" in run("revoke", "alice")[1]
    assert file.read() == ()
    code, _, error = run("revoke", "alice")
    assert code == 1
    assert "trocar admin token list" in error


def test_the_data_directory_may_be_an_option(run: Any, file: TokenFile, tmp_path: Path) -> None:
    other = str(tmp_path / "other")
    assert run("create", "alice", "--scope", "run", "--data-dir", other)[0] == 0
    assert [grant.name for grant in TokenFile(tmp_path / "other").read()] == ["alice"]
    assert file.read() == ()
    assert "alice" in run("list", "--data-dir", other)[1]
    assert run("revoke", "alice", "--data-dir", other)[0] == 0
    assert TokenFile(tmp_path / "other").read() == ()


def test_the_data_directory_may_come_from_the_config_file(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TROCAR_DATA_DIR")
    config = tmp_path / "server.toml"
    config.write_text(f'[server]\ndata_dir = "{tmp_path / "other"}"\n')
    run("create", "alice", "--scope", "run", "--config", str(config))
    assert [grant.name for grant in TokenFile(tmp_path / "other").read()] == ["alice"]
    assert run("list", "--config", str(tmp_path / "nowhere.toml"))[0] == 1
