"""`trocar status`: whether a server is ready, what it is, and what it does."""

from dataclasses import asdict
from typing import Annotated

import typer

from trocar import Client, NotFoundError
from trocar._cli.commands.server.operating_commands import one_server
from trocar._cli.console import show_json
from trocar._cli.failures import fail, refuse
from trocar._cli.options.arguments import AsJson


def status(
    client: Client,
    *,
    ready: Annotated[
        bool, typer.Option("--ready", help="Only check readiness: exit 0 ready, 1 not ready, 3 unreachable.")
    ] = False,
    service: Annotated[
        str,
        typer.Option(metavar="NAME", help="With --ready: one service, such as trocar_api.v1.ModelService."),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show a server's version, device and features, its queues, callers and caches.

    Calls that wait and the seconds that they need, by model; each caller's work and its share of the last
    minute's computing; size and hits of caches. Without the scope admin, of the callers only yourself.
    """
    if service and not ready:
        refuse("--service is of --ready")
    if ready:
        _check_ready(client, service)
        return
    with one_server():
        result, now = client.server_info(), client.status()
    if as_json:
        show_json({"server": asdict(result), "status": asdict(now)})
    else:
        typer.echo(f"{result}\n\n{now}".rstrip())


def _check_ready(client: Client, service: str) -> None:
    try:
        is_serving = client.is_serving(service)
    except NotFoundError:
        fail(f"the server has no service {service!r}; leave out --service for all of them together")
    if not is_serving:
        fail("the server is not ready: it is loading models or shutting down")
    typer.echo("serving")
