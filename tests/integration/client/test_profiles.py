"""`trocar login` and `trocar config` against real servers, with TLS and without."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trocar
from tests.support.servers.certificates import OPENSSL, authority, signed
from tests.support.servers.serving import Serve
from trocar._cli import main
from trocar._transport.profiles import profiles_file, read_profiles
from trocar_server.auth import Scope, TokenFile

Run = Callable[..., tuple[Any, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    for name in ("TROCAR_SERVER", "TROCAR_TOKEN", "TROCAR_CA", "TROCAR_PROFILE"):
        monkeypatch.delenv(name, raising=False)

    def command(*words: object) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*map(str, words)])
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return command


def test_a_login_serves_later_commands_and_python(serve: Serve, run: Run) -> None:
    address = serve(models={}).address
    code, out, err = run("login", f"http://{address}", "--token", "a-long-secret-of-mine")
    assert code == 0, err
    assert address in out
    assert profiles_file().stat().st_mode & 0o777 == 0o600
    assert run("status")[0] == 0
    with trocar.connect() as client:
        assert client.models() == []
    code, out, _ = run("config", "show", "--json")
    assert json.loads(out)["used"] == {"server": address, "from": "profile default", "tls": False}
    assert "a-long-secret-of-mine" not in out + run("config", "show")[1]


def test_a_second_login_asks_for_the_token_again(
    serve: Serve, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = serve(models={}).address
    assert run("login", address, "--token", "old")[0] == 0
    assert run("login", address)[0] == 0  # no terminal, so the stored one stays
    assert read_profiles().get("default").token == "old"
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("typer.prompt", lambda *_, **__: "new")
    assert run("login", address)[0] == 0
    assert read_profiles().get("default").token == "new"
    monkeypatch.setenv("TROCAR_TOKEN", "theirs")
    assert run("login", address)[0] == 0
    assert read_profiles().get("default").token == "theirs"


def test_the_profile_of_the_environment_is_made_by_its_login(
    serve: Serve, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = serve(models={}).address
    monkeypatch.setenv("TROCAR_PROFILE", "lab")
    code, _, err = run("status")
    assert code == 2
    assert "`trocar login SERVER --profile lab`" in " ".join(err.split())
    code, _, err = run("login", address, "--profile", "lab")
    assert code == 0, err
    assert read_profiles().get("lab").server == address
    assert run("status")[0] == 0


def test_a_login_without_a_token_is_tested_without_one(
    serve: Serve, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, token = TokenFile(tmp_path / "data").add("me", [Scope.RUN], expires_at_s=None, now_s=time.time())
    address = serve(models={}, tokens=True, data_dir=tmp_path / "data").address
    assert run("login", address, "--token", token)[0] == 0
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("typer.prompt", lambda *_, **__: "")
    code, _, err = run("login", address)
    assert code == 1
    assert "[TOKEN_MISSING]" in err
    assert read_profiles().get("default").token == token


def test_a_login_that_fails_stores_nothing(run: Run) -> None:
    code, _, err = run("login", "127.0.0.1:1", "--token", "secret")
    assert code == 3
    assert "no connection" in err
    assert not profiles_file().exists()


def test_settings_are_changed_and_profiles_chosen(run: Run) -> None:
    assert run("config", "set", "server=gpu1", "tls=true", "--profile", "lab")[0] == 0
    assert run("config", "set", "server=gpu2", "token=t", "--profile", "home")[0] == 0
    assert read_profiles().current == "lab"
    assert run("config", "use", "home")[0] == 0
    assert run("config", "set", "token=")[0] == 0
    found = read_profiles()
    assert (found.current, found.get("home").token, found.get("lab").tls) == ("home", "", True)
    code, _, err = run("config", "set", "sever=x")
    assert code == 2
    assert "did you mean server" in " ".join(err.split())
    code, _, err = run("config", "use", "hme")
    assert code == 2
    assert "did you mean home" in " ".join(err.split())


@pytest.mark.skipif(OPENSSL is None, reason="needs the openssl command to make certificates")
def test_tls_mistakes_say_what_mends_them(serve: Serve, run: Run, tmp_path: Path) -> None:
    own, other = authority(tmp_path), authority(tmp_path, "other")
    made = signed(own, tmp_path, "server", "/CN=localhost")
    secure = serve(models={}, tls_cert=made.certificate, tls_key=made.key).address.rpartition(":")[2]
    plain = serve(models={}).address.rpartition(":")[2]
    trusted, untrusted = (trocar.TlsOptions(ca=ca.certificate) for ca in (own, other))
    mistakes: list[tuple[str, Any, str]] = [
        (plain, trusted, "the server speaks plain text"),
        (secure, None, "connect with tls=True"),
        (secure, True, "pass the authority's file"),
        (secure, untrusted, "pass the authority's file"),
    ]
    for port, tls, cure in mistakes:
        with (
            trocar.connect(f"localhost:{port}", tls=tls, retries=0) as client,
            pytest.raises(trocar.errors.ServerUnavailableError, match=cure),
        ):
            client.models()
    code, _, err = run("login", f"https://localhost:{secure}", "--ca", own.certificate)
    assert code == 0, err
    assert read_profiles().get("default").ca == str(own.certificate)
    assert run("status")[0] == 0
