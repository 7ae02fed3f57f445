"""Connection settings: what a caller leaves out, from the environment or a profile.

| setting | argument  | environment     | profile          | else              |
|---------|-----------|-----------------|------------------|-------------------|
| server  | `target`  | `TROCAR_SERVER` | `server`         | `localhost:50051` |
| token   | `token`   | `TROCAR_TOKEN`  | `token`          | none              |
| TLS     | `tls`     | `TROCAR_CA`     | `ca`, `tls`, ... | none              |

Certificates to trust (`ca`) and the client's own certificate with its key are two settings: what `TlsOptions`
leaves out comes from the environment or the profile. `tls=True` leaves out nothing.

A profile counts as a whole, and only for its own server: its token never goes to another one. It is the one
that is named (`profile`, `TROCAR_PROFILE`), or else the current one of the file.
"""

import os
from dataclasses import dataclass, replace

from trocar._transport.channel import LOCAL, TlsOptions
from trocar._transport.profiles import Profile, read_profiles
from trocar._transport.targets import DEFAULT_TARGET, with_default_port

SERVER, TOKEN, CA, PROFILE = "TROCAR_SERVER", "TROCAR_TOKEN", "TROCAR_CA", "TROCAR_PROFILE"


@dataclass(frozen=True)
class ConnectSettings:
    """Server and credentials of a connection."""

    target: str
    token: str | None
    tls: TlsOptions | bool | None
    origin: str
    """Where the server comes from, for people."""


def connect_settings(
    target: str | None = None,
    token: str | None = None,
    tls: TlsOptions | bool | None = None,
    profile: str | None = None,
    *,
    is_login: bool = False,
) -> ConnectSettings:
    """Return the settings of a connection; None stands for what the caller leaves out.

    Args:
        target: As in `connect`.
        token: As in `connect`.
        tls: As in `connect`.
        profile: As in `connect`.
        is_login: Whether a named profile may be missing: a login is about to create it.

    Raises:
        TypeError: `tls` is neither a bool nor `TlsOptions`.
        ValueError: The address, a profile or the file of profiles is not valid, or there is no such profile.
        OSError: The file of profiles cannot be read.
    """
    if not isinstance(tls, (TlsOptions, bool, type(None))):
        raise TypeError(f"tls is {tls!r}; give True, or trocar.TlsOptions(ca=...) for an authority's file")
    if target == LOCAL:
        return ConnectSettings(LOCAL, token, tls, "given")
    asked = target if target is not None else os.environ.get(SERVER) or None
    origin = "given" if target is not None else SERVER if asked else "the default"
    name = profile or os.environ.get(PROFILE)
    chosen, chosen_name = _profile(name, is_needed=asked is None, may_be_missing=is_login)
    if asked is None and chosen is not None and chosen.server:
        asked, origin = chosen.server, f"profile {chosen_name}"
    address, wants_tls = with_default_port(asked if asked is not None else DEFAULT_TARGET)
    if chosen is not None and (not chosen.server or with_default_port(chosen.server)[0] != address):
        chosen = None  # another server's credentials
    found_tls = tls if isinstance(tls, bool) else _tls(tls, chosen or Profile())
    if wants_tls is not None and found_tls is not None and bool(found_tls) != wants_tls:
        scheme = "https://" if wants_tls else "http://"
        raise ValueError(
            f"{asked}: {scheme} says {'TLS' if wants_tls else 'plain text'}, and the other settings the "
            "opposite; leave out one of them"
        )
    own_token = token or os.environ.get(TOKEN) or (chosen.token if chosen else None) or None
    return ConnectSettings(address, own_token, found_tls if found_tls is not None else wants_tls, origin)


def _profile(name: str | None, *, is_needed: bool, may_be_missing: bool) -> tuple[Profile | None, str]:
    """Return the profile that is named, or else the current one, and its name."""
    if name:
        profiles = read_profiles()
        return (profiles.named.get(name) if may_be_missing else profiles.get(name)), name
    try:
        profiles = read_profiles()
    except (ValueError, OSError):
        if is_needed:
            raise
        return None, ""
    return (profiles.get(profiles.current), profiles.current) if profiles.current else (None, "")


def _tls(given: TlsOptions | None, profile: Profile) -> TlsOptions | bool | None:
    """Return the certificates: each as given, or else of the environment, or else of the profile."""
    ca = os.environ.get(CA) or profile.ca or None
    own = TlsOptions(ca, profile.cert or None, profile.key or None)
    if given is None:
        return own if own != TlsOptions() else profile.tls or None
    if given.certificate is None and given.key is None:  # they belong together
        given = replace(given, certificate=own.certificate, key=own.key)
    return replace(given, ca=ca) if given.ca is None else given
