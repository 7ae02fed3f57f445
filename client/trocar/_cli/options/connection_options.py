"""Connection options: the server's address and credentials, and a client made from them."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import Annotated, Any, Concatenate

import typer

import trocar
from trocar._cli.failures import refuse
from trocar._cli.help_sections import CONNECT

_option = functools.partial(typer.Option, rich_help_panel=CONNECT)
_chosen: ContextVar[Mapping[str, Any]] = ContextVar("chosen")
"""Connection options of the running command."""


def connected(command: Callable[Concatenate[trocar.Client, ...], None]) -> Callable[..., None]:
    """Convert a function whose first parameter is a client to a command.

        def unload(client: Client, model_id: str) -> None: ...

        app.command()(connected(unload))     # trocar admin unload MODEL_ID --server ... --timeout ...

    The command has the options of `_connect` in place of the client, which is closed at its end.
    """
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    options = _options()

    @functools.wraps(command)
    def run(**given: Any) -> None:
        chosen = {option.name: given.pop(option.name) for option in options}
        _chosen.set(chosen)
        with client_of(chosen) as client:
            command(client, **given)

    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *options)]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def client_of(given: Mapping[str, Any]) -> trocar.Client:
    """Connect as the options of a command line say; options that are not given have their defaults.

    Raises:
        typer.BadParameter: They contradict each other, or an address is none.
    """
    names = [option.name for option in _options()]
    return _connect(**{name: given[name] for name in names if name in given})


def connection_words() -> list[str]:
    """Return the options that connect as the running command did, without its token."""
    given = _given()
    flags = ["--tls"] if given.pop("tls", False) else []
    return [*(word for name, value in given.items() for word in (f"--{name}", str(value))), *flags]


def connection_code() -> str:
    """Return Python that connects as the running command did, without its token."""
    given = _given()
    address = [repr(given.pop("server"))] if "server" in given else []
    files = {name: str(given.pop(name)) for name in ("ca", "cert", "key") if name in given}
    if files:
        named = {"certificate" if name == "cert" else name: value for name, value in files.items()}
        options = ", ".join(f"{name}={value!r}" for name, value in named.items())
        given.pop("tls", None)
        address.append(f"tls=trocar.TlsOptions({options})")
    return f"trocar.connect({', '.join([*address, *(f'{name}={value!r}' for name, value in given.items())])})"


def _given() -> dict[str, Any]:
    """Return the options of the running command that say where to connect, and were given."""
    names = [option.name for option in _options() if option.name not in ("token", "timeout")]
    result = _chosen.get()
    return {name: result[name] for name in names if result.get(name)}


def _options() -> list[inspect.Parameter]:
    return list(inspect.signature(_connect, eval_str=True).parameters.values())


def _connect(
    server: Annotated[
        str | None,
        _option(
            metavar="ADDRESS",
            help="Address of the server: host, host:port, https://host or unix:/path. Default: "
            "TROCAR_SERVER, the profile's, or localhost:50051.",
        ),
    ] = None,
    timeout: Annotated[float, _option(metavar="SECONDS", help="Deadline of each call, in seconds.")] = 60.0,
    token: Annotated[
        str | None, _option(metavar="TOKEN", help="Bearer token. Default: TROCAR_TOKEN, or the profile's.")
    ] = None,
    tls: Annotated[bool, _option("--tls", help="Connect with TLS.")] = False,
    ca: Annotated[
        Path | None,
        _option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="PEM file of the certificates to trust; implies --tls. Default: TROCAR_CA, or the "
            "profile's.",
        ),
    ] = None,
    cert: Annotated[
        Path | None,
        _option(
            metavar="FILE",
            exists=True,
            dir_okay=False,
            help="PEM file of the client certificate; implies --tls.",
        ),
    ] = None,
    key: Annotated[
        Path | None, _option(metavar="FILE", exists=True, dir_okay=False, help="PEM file of its private key.")
    ] = None,
    profile: Annotated[
        str | None,
        _option(
            metavar="NAME", help="Profile of `trocar config`. Default: TROCAR_PROFILE, or the current one."
        ),
    ] = None,
) -> trocar.Client:
    if (cert is None) != (key is None):
        refuse("--cert and --key belong together")
    if not (math.isfinite(timeout) and timeout > 0):
        refuse(f"--timeout is {timeout:g}; give a number of seconds above 0")
    options = trocar.TlsOptions(ca=ca, certificate=cert, key=key) if ca or cert else tls or None
    try:
        return trocar.connect(server, timeout_s=timeout, token=token, tls=options, profile=profile)
    except ValueError as error:
        refuse(str(error))
