"""`trocar ready` and `trocar info`: readiness and capabilities of a server."""

from typing import Annotated

import typer

from trocar import Client
from trocar._cli.console import show_json
from trocar._cli.failures import fail
from trocar._cli.options.arguments import AsJson


def ready(
    client: Client,
    service: Annotated[
        str, typer.Option(metavar="NAME", help="Check one service, for example trocar_api.v1.ModelService.")
    ] = "",
) -> None:
    """Check readiness: exit 0 ready, 1 not ready, 3 unreachable."""
    if not client.is_serving(service):
        fail("the server is not ready: it is loading models or shutting down")
    typer.echo("serving")


def info(client: Client, as_json: AsJson = False) -> None:
    """Show a server's version, device and features."""
    found = client.server_info()
    show_json(found) if as_json else typer.echo(str(found))
