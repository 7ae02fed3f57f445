"""`trocar doctor`: the report on a terminal, or as JSON."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer

from trocar_server.config import ServerConfig, read_config
from trocar_server.doctor.finding import Finding, Level, fail, ok
from trocar_server.doctor.running import examine
from trocar_server.errors import ServiceError

_COLOURS = {Level.OK: typer.colors.GREEN, Level.WARN: typer.colors.YELLOW, Level.FAIL: typer.colors.RED}


def doctor(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The server's TOML file; see docs/serving.md.")
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="The server's data directory, as `trocar serve --data-dir` names it."
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Also check this running server: host:port or unix:/path."),
    ] = None,
    token: Annotated[
        str | None, typer.Option(metavar="TOKEN", help="Token for that server. Default: TROCAR_TOKEN.")
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Connect to that server with TLS.")] = False,
    tls_ca: Annotated[
        Path | None, typer.Option(metavar="FILE", help="CA certificates to trust; implies --tls.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, also for errors.")] = False,
) -> None:
    """Check the machine, the configuration and a running server.

    Prints advice for every problem. Exit code 1 if a line says FAIL, 0 otherwise. Changes nothing.
    """
    token = token or os.environ.get("TROCAR_TOKEN", "")
    server = _server(address, token, tls=tls, ca=tls_ca) if address else ()
    findings = _report(chain(_found(config, data_dir), server), is_shown=not as_json)
    worst = max(findings, key=lambda finding: list(Level).index(finding.level)).level
    if as_json:
        plain = [finding.plain() for finding in findings]
        typer.echo(json.dumps({"worst": worst.value, "findings": plain}, indent=2))
    else:
        _summarise(findings)
    raise typer.Exit(1 if worst is Level.FAIL else 0)


def _report(result: Iterable[Finding], *, is_shown: bool) -> list[Finding]:
    findings = []
    for finding in result:
        findings.append(finding)
        if is_shown:
            _show(finding)
    return findings


def _found(config: Path | None, data_dir: Path | None) -> Iterator[Finding]:
    try:
        settings = read_config(config, **({} if data_dir is None else {"data_dir": data_dir}))
        yield ok("configuration", f"'{config}'" if config else "no file; defaults and environment apply")
    except ServiceError as error:
        yield fail("configuration", error.message, "correct it; the rest is checked with the defaults")
        settings = ServerConfig.model_construct()
    yield from examine(settings)


def _server(address: str, token: str, *, tls: bool, ca: Path | None) -> Iterator[Finding]:
    from trocar_server.doctor.server_checks import Target, check_server

    yield from check_server(Target(address, token, ca, tls))


def _show(finding: Finding) -> None:
    mark = typer.style(f"{finding.level.value:4}", fg=_COLOURS[finding.level])
    typer.echo(f"{mark}  {finding.subject}: {finding.text}")
    if finding.advice:
        typer.echo(f"      -> {finding.advice}")


def _summarise(findings: Sequence[Finding]) -> None:
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    typer.echo(f"{counts[Level.OK]} OK, {counts[Level.WARN]} WARN, {counts[Level.FAIL]} FAIL")
