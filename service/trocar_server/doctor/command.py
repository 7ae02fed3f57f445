"""`trocar doctor`: the report on a terminal, or as JSON."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from trocar_server.config import ServerConfig, read_config
from trocar_server.doctor.finding import Finding, Level, fail, ok
from trocar_server.doctor.running import examine
from trocar_server.errors import ServiceError

_COLOURS = {Level.OK: typer.colors.GREEN, Level.WARN: typer.colors.YELLOW, Level.FAIL: typer.colors.RED}


def doctor(
    config: Annotated[Path | None, typer.Option(help="The server's TOML file; see docs/serving.md")] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="The server's data directory, as `trocar serve --data-dir` names it.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Also check this running server: host:port or unix:/path")
    ] = None,
    token: Annotated[str | None, typer.Option(help="Token for that server [default: $TROCAR_TOKEN]")] = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="CA certificates to trust, if that server uses TLS")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, also for errors.")] = False,
) -> None:
    """Check the machine, the configuration and a running server.

    Prints advice for every problem. Exit code 1 if a line says FAIL, 0 otherwise. Changes nothing.
    """
    findings = _report(
        config, data_dir, address, token or os.environ.get("TROCAR_TOKEN", ""), tls_ca, not as_json
    )
    worst = max(findings, key=lambda finding: list(Level).index(finding.level)).level
    if as_json:
        plain = [finding.plain() for finding in findings]
        typer.echo(json.dumps({"worst": worst.value, "findings": plain}, indent=2))
    else:
        _summarise(findings)
    raise typer.Exit(1 if worst is Level.FAIL else 0)


def _report(
    config: Path | None,
    data_dir: Path | None,
    address: str | None,
    token: str,
    tls_ca: Path | None,
    is_shown: bool,
) -> list[Finding]:
    findings = []
    for finding in _found(config, data_dir, address, token, tls_ca):
        findings.append(finding)
        if is_shown:
            _show(finding)
    return findings


def _found(
    config: Path | None, data_dir: Path | None, address: str | None, token: str, tls_ca: Path | None
) -> Iterator[Finding]:
    try:
        settings = read_config(config, **({} if data_dir is None else {"data_dir": data_dir}))
        yield ok("configuration", f"'{config}'" if config else "no file; defaults and environment apply")
    except ServiceError as error:
        yield fail("configuration", error.message, "correct it; the rest is checked with the defaults")
        settings = ServerConfig.model_construct()
    yield from examine(settings)
    if address:
        from trocar_server.doctor.server_checks import Target, check_server

        yield from check_server(Target(address, token, tls_ca))


def _show(finding: Finding) -> None:
    mark = typer.style(f"{finding.level.value:4}", fg=_COLOURS[finding.level])
    typer.echo(f"{mark}  {finding.subject}: {finding.text}")
    if finding.advice:
        typer.echo(f"      -> {finding.advice}")


def _summarise(findings: Sequence[Finding]) -> None:
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    typer.echo(f"{counts[Level.OK]} OK, {counts[Level.WARN]} WARN, {counts[Level.FAIL]} FAIL")
