"""`trocar ready`: the health check of scripts and containers."""

from typing import Annotated

import typer

from trocar import Client
from trocar._cli.failures import fail


def ready(
    client: Client,
    service: Annotated[
        str, typer.Option(metavar="NAME", help="Ask for one service, for example trocar_api.v1.ModelService.")
    ] = "",
) -> None:
    """Tell whether a server serves: exit with 0 when it does, 1 when it does not, 3 when nobody answers."""
    if not client.is_serving(service):
        fail("the server does not serve: it is still loading models, or it is stopping")
    typer.echo("serving")
