"""`trocar page`: a web page of a server, served from this machine."""

import json
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path
from threading import Event
from typing import Annotated

import typer

from trocar import Client
from trocar._cli.failures import refuse
from trocar.errors import PermissionDeniedError


def page(  # noqa: PLR0913 - options of a command
    client: Client,
    *,
    host: Annotated[
        str,
        typer.Option(
            metavar="HOST", help="Name or address of this machine where the page listens and is opened."
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="NUMBER", min=0, max=65535, help="TCP port of the page, 0 for a free one.")
    ] = 8080,
    page_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM file of the page's own certificate chain.")
    ] = None,
    page_key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="PEM file of its private key, without a password.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Allow any address without TLS, as in a private network.")
    ] = False,
    open_browser: Annotated[
        bool, typer.Option("--open/--no-open", help="Open the page in this machine's browser.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the address as a line of JSON.")] = False,
    stop_with_stdin: Annotated[
        bool,
        typer.Option(
            "--stop-with-stdin", help="Stop at the end of standard input: with the program that writes it."
        ),
    ] = False,
) -> None:
    """Serve a web page of a server until stopped: modules, feature maps and classes in a browser."""
    with suppress(PermissionDeniedError):  # the page asks its user for a token
        client.server_info()  # a wrong address fails here, in words
    try:
        served = client.page(host=host, port=port, certificate=page_cert, key=page_key, insecure=insecure)
    except ValueError as error:
        refuse(str(error))
    with served:
        if as_json:
            print(json.dumps({"url": served.url}), flush=True)
        else:
            typer.echo(f"the page is on {served.url} (Ctrl-C stops it)")
        if open_browser:
            webbrowser.open(served.url)
        with suppress(KeyboardInterrupt):
            _wait(stop_with_stdin)


def _wait(stop_with_stdin: bool) -> None:
    """Wait for the end of standard input, or until killed."""
    if not stop_with_stdin:
        Event().wait()
    while sys.stdin.buffer.read(1):
        pass
