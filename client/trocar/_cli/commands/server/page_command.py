"""`trocar page`: a web page of a server, served from this machine."""

import time
import webbrowser
from contextlib import suppress
from typing import Annotated

import typer

from trocar import Client
from trocar._cli.failures import refuse


def page(
    client: Client,
    *,
    host: Annotated[
        str, typer.Option(metavar="HOST", help="Address of this machine where the page listens.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="NUMBER", min=0, max=65535, help="TCP port of the page, 0 for a free one.")
    ] = 8080,
    open_browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in this machine's browser.")
    ] = False,
) -> None:
    """Serve a web page of a server until stopped: modules, feature maps and classes in a browser."""
    client.server_info()  # a wrong address or token fails here, in words
    try:
        served = client.page(host=host, port=port)
    except ValueError as error:
        refuse(f"--host: {error}")
    with served:
        typer.echo(f"the page is on {served.url} (Ctrl-C stops it)")
        if open_browser:
            webbrowser.open(served.url)
        with suppress(KeyboardInterrupt):
            while True:
                time.sleep(3600)
