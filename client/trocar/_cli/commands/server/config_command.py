"""`trocar login` and `trocar config`: servers and credentials in a file of the user's own."""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import trocar
from trocar._cli.console import show_json
from trocar._cli.failures import refuse
from trocar._cli.help_sections import SectionedCommand, SectionedGroup
from trocar._cli.options.arguments import AsJson
from trocar._transport.channel import MAX_RETRIES, ConnectOptions
from trocar._transport.profiles import Profile, Profiles, profiles_file, read_profiles, write_profiles
from trocar._transport.settings import TOKEN, ConnectSettings, connect_settings
from trocar._transport.targets import with_default_port

_DEFAULT = "default"
_TIMEOUT_S = 60.0
_SHOWN = 4
"""Characters of a token that are shown."""

ProfileName = Annotated[str, typer.Option("--profile", metavar="NAME", help="Name of the profile.")]


def config_app(epilog: str) -> typer.Typer:
    """Make the group of commands."""
    app = typer.Typer(
        cls=SectionedGroup,
        no_args_is_help=True,
        rich_markup_mode=None,
        epilog=epilog,
        help="Show and change the profiles: servers with their credentials.",
    )
    for name, command in (("show", show), ("set", set_values), ("use", use)):
        app.command(name, cls=SectionedCommand, epilog=epilog)(command)
    return app


def login(
    server: Annotated[
        str, typer.Argument(metavar="SERVER", help="Address: host, host:port, https://host or unix:/path.")
    ],
    *,
    profile: ProfileName = _DEFAULT,
    token: Annotated[
        str | None,
        typer.Option(
            metavar="TOKEN", help="Bearer token. Default: TROCAR_TOKEN, or asked for on a terminal."
        ),
    ] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Connect with TLS.")] = False,
    ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", exists=True, dir_okay=False, help="PEM file of the certificates to trust."
        ),
    ] = None,
    cert: Annotated[
        Path | None,
        typer.Option(metavar="FILE", exists=True, dir_okay=False, help="PEM file of the client certificate."),
    ] = None,
    key: Annotated[
        Path | None,
        typer.Option(metavar="FILE", exists=True, dir_okay=False, help="PEM file of its private key."),
    ] = None,
) -> None:
    """Test a server and store it as the current profile, for later commands and `trocar.connect()`.

    The file is for you alone (mode 0600). Nothing is stored if the server cannot be used.
    """
    profiles = _read()
    files = {"ca": ca, "cert": cert, "key": key}
    options = trocar.TlsOptions(ca, cert, key) if any(files.values()) else tls or None
    try:
        result = connect_settings(server, token, options, is_login=True)
        made = _made(result, _token(token, result.token))
        with _client(made, result.tls) as client:
            count, version = len(client.models()), client.server_info().version
    except ValueError as error:
        refuse(str(error))
    address = made.server
    path = write_profiles(profiles.with_profile(profile, made, is_current=True))
    typer.echo(f"{address}: trocar {version}, {count} models; profile {profile} is current ({path})")


def show(*, as_json: AsJson = False) -> None:
    """Print the profiles, and what a command without options would use; tokens are hidden."""
    profiles = _read()
    try:
        used = connect_settings()
    except ValueError as error:
        refuse(str(error))
    listed = {name: _hidden(profile) for name, profile in profiles.named.items()}
    if as_json:
        show_json(
            {
                "file": str(profiles_file()),
                "current": profiles.current,
                "profiles": listed,
                "used": {"server": used.target, "from": used.origin, "tls": bool(used.tls)},
            }
        )
        return
    typer.echo(f"file: {profiles_file()}")
    for name, values in listed.items():
        mark = " (current)" if name == profiles.current else ""
        typer.echo(f"{name}{mark}: " + ", ".join(f"{key}={value}" for key, value in values.items()))
    tls = "TLS" if used.tls else "plain text"
    typer.echo(f"used: {used.target} ({used.origin}), {tls}, {'a' if used.token else 'no'} token")


def set_values(
    values: Annotated[
        list[str],
        typer.Argument(
            metavar="SETTING=VALUE...",
            help="server, token, ca, cert, key or tls; an empty value removes the setting.",
        ),
    ],
    *,
    profile: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the profile. Default: the current one, or `default`."),
    ] = None,
) -> None:
    """Change settings of a profile, which is created if needed."""
    profiles = _read()
    name = profile or profiles.current or _DEFAULT
    changed = profiles.named.get(name, Profile())
    try:
        for text in values:
            setting, equals, value = text.partition("=")
            if not equals:
                refuse(f"{text!r} is not SETTING=VALUE; write for example server=gpu1:50051")
            changed = changed.with_value(setting.strip(), value.strip())
        if changed.server:
            with_default_port(changed.server)
    except ValueError as error:
        refuse(str(error))
    write_profiles(profiles.with_profile(name, changed))
    typer.echo(f"{name}: " + ", ".join(f"{key}={value}" for key, value in _hidden(changed).items()))


def use(name: Annotated[str, typer.Argument(metavar="PROFILE", help="Name of a profile.")]) -> None:
    """Make a profile the current one."""
    profiles = _read()
    try:
        profiles.get(name)
    except ValueError as error:
        refuse(str(error))
    write_profiles(Profiles(name, profiles.named))
    typer.echo(f"profile {name} is current")


def _made(outcome: ConnectSettings, token: str) -> Profile:
    """Return the profile that stands for settings."""
    tls = outcome.tls if isinstance(outcome.tls, trocar.TlsOptions) else trocar.TlsOptions()
    files = {"ca": tls.ca, "cert": tls.certificate, "key": tls.key}
    given = {name: str(Path(str(path)).absolute()) for name, path in files.items() if path is not None}
    return Profile(outcome.target, token, tls=bool(outcome.tls), **given)


def _client(made: Profile, tls: trocar.TlsOptions | bool | None) -> trocar.Client:
    """Connect as a profile says; unlike `connect`, without the settings of another one."""
    token = made.token or None
    return trocar.Client(ConnectOptions(made.server, _TIMEOUT_S, token, tls, retries=MAX_RETRIES))


def _read() -> Profiles:
    try:
        return read_profiles()
    except ValueError as error:
        refuse(str(error))


def _token(given: str | None, known: str | None) -> str:
    """Return the token to store: given, of the environment, or asked for; without a terminal a known one."""
    given = given or os.environ.get(TOKEN)
    if given or not sys.stdin.isatty():
        return given or known or ""
    return str(typer.prompt("token (empty for none)", default="", hide_input=True, show_default=False))


def _hidden(profile: Profile) -> dict[str, str]:
    """Return the settings that are there, the token hidden."""
    values = {name: str(value) for name, value in asdict(profile).items() if value}
    if "token" in values:
        values["token"] = f"{profile.token[:_SHOWN]}..." if len(profile.token) > 4 * _SHOWN else "..."
    return values
