"""`trocar admin token`: token management for operators, on the server's machine, while it runs, too."""

import json
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from trocar_server.app.log_format import stderr_log
from trocar_server.auth import Grant, Scope, TokenFile
from trocar_server.config import read_config

_UNITS_S = {"h": 3600, "d": 86_400, "w": 604_800}
_LONGEST_S = 3650 * 86_400

ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="The server's TOML file, where it sets data_dir."),
]

DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="FOLDER", help="The server's data directory; overrides the file."),
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, also for errors.")]

token_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    help="Create, list and revoke the tokens of a server. A running server notices within a second.",
)


@token_app.command("create")
def create(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Owner of the token; trainers, data sets and edits belong to this name."
        ),
    ],
    scope: Annotated[
        list[Scope],
        typer.Option(help="Scope to grant; repeat for more. run and train include read, admin includes all."),
    ],
    expires: Annotated[str, typer.Option(metavar="TIME", help="Lifetime: 12h, 30d, 8w or never.")] = "90d",
    certificate: Annotated[
        bool,
        typer.Option(
            "--certificate", help="Create no token; grant the scopes to client certificates of that name."
        ),
    ] = False,
    as_json: AsJson = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Create a token and print it once. Others of the same name stay valid."""
    now_s = time.time()
    lifetime_s = _duration_s(expires)
    grant, token = _file(config, data_dir).add(
        name,
        scope,
        expires_at_s=None if lifetime_s is None else int(now_s) + lifetime_s,
        now_s=now_s,
        for_certificate=certificate,
    )
    if as_json:
        typer.echo(json.dumps({**_plain(grant, now_s), "token": token or None}, indent=2))
        return
    kept = (
        "is not stored and is shown only once; hand it over safely"
        if token
        else "applies to client certificates of this name"
    )
    typer.echo(f"{_line(grant, now_s)}\nThis {kept}.", err=True)
    if token:
        typer.echo(token)


@token_app.command("list")
def list_tokens(
    as_json: AsJson = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """List tokens: id, name, scopes, dates. Tokens themselves are not stored."""
    grants = _file(config, data_dir).read()
    now_s = time.time()
    if as_json:
        typer.echo(json.dumps([_plain(grant, now_s) for grant in grants], indent=2))
        return
    typer.echo("\n".join(_line(grant, now_s) for grant in grants) or "there are no tokens")


@token_app.command("revoke")
def revoke(
    name: Annotated[
        str, typer.Argument(metavar="NAME|ID", help="A name (all of its tokens), or the id of one token.")
    ],
    as_json: AsJson = False,
    config: ConfigFile = None,
    data_dir: DataDir = None,
) -> None:
    """Revoke tokens; a running server ends their calls within two seconds."""
    gone = _file(config, data_dir).revoke(name)
    now_s = time.time()
    if as_json:
        typer.echo(json.dumps([_plain(grant, now_s) for grant in gone], indent=2))
        return
    typer.echo("\n".join(f"revoked {_line(grant, now_s)}" for grant in gone))


def _file(config: Path | None, data_dir: Path | None) -> TokenFile:
    from trocar_server.app.state_folder import settle

    overrides = {} if data_dir is None else {"data_dir": data_dir}
    return TokenFile(settle(read_config(config, **overrides), stderr_log()))


def _duration_s(text: str) -> int | None:
    if text == "never":
        return None
    match = re.fullmatch(r"([1-9][0-9]{0,5})([hdw])", text)
    seconds = int(match[1]) * _UNITS_S[match[2]] if match else 0
    if not 0 < seconds <= _LONGEST_S:
        raise typer.BadParameter(f"--expires {text}: write 12h, 30d or 8w, ten years at most, or never")
    return seconds


def _line(grant: Grant, now_s: float) -> str:
    plain = _plain(grant, now_s)
    end = f"until {plain['expires_at']}" if plain["expires_at"] else "for ever"
    state = f"expired {plain['expires_at']}" if plain["is_expired"] else end
    scopes = ",".join(plain["scopes"])
    return f"{grant.grant_id}  {grant.name}  {plain['kind']}  {scopes}  made {plain['created_at']}  {state}"


def _plain(grant: Grant, now_s: float) -> dict[str, Any]:
    return {
        "id": grant.grant_id,
        "name": grant.name,
        "kind": "certificate" if grant.token_sha256 is None else "token",
        "scopes": sorted(grant.scopes),
        "created_at": _date(grant.created_at_s),
        "expires_at": None if grant.expires_at_s is None else _date(grant.expires_at_s),
        "is_expired": grant.is_expired(now_s),
    }


def _date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
