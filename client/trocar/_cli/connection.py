"""The options that say where the server is, and the client that they make."""

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Concatenate

import typer

import trocar
from trocar._cli.failures import refuse


def connected(command: Callable[Concatenate[trocar.Client, ...], None]) -> Callable[..., None]:
    """Make a command of a function whose first parameter is a client.

        def unload(client: Client, model_id: str) -> None: ...

        app.command()(connected(unload))     # trocar unload MODEL_ID --server ... --timeout ...

    The command has the options of `_connect` in place of the client, which is closed at its end.
    """
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    options = list(inspect.signature(_connect, eval_str=True).parameters.values())

    @functools.wraps(command)
    def run(**given: Any) -> None:
        with _connect(**{option.name: given.pop(option.name) for option in options}) as client:
            command(client, **given)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *options)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _connect(
    server: Annotated[
        str, typer.Option(envvar="TROCAR_SERVER", help="Where the server listens, host:port.")
    ] = "localhost:50051",
    timeout: Annotated[float, typer.Option(help="Deadline of each call, in seconds.")] = 60.0,
    token: Annotated[
        str | None, typer.Option(envvar="TROCAR_TOKEN", help="Bearer token.", show_envvar=True)
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Connect with TLS.")] = False,
    ca: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="PEM file of the certificates to trust; implies --tls."
        ),
    ] = None,
    cert: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="PEM file of your own certificate; implies --tls."),
    ] = None,
    key: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="PEM file of its private key.")
    ] = None,
) -> trocar.Client:
    if (cert is None) != (key is None):
        refuse("--cert and --key belong together")
    options = trocar.TlsOptions(ca=ca, certificate=cert, key=key) if ca or cert else tls
    try:
        return trocar.connect(server, timeout_s=timeout, token=token, tls=options)
    except ValueError as error:
        refuse(str(error))
