"""Profiles: servers with their credentials, in a file of the user's own.

    current = "lab"

    [profiles.lab]
    server = "gpu1:50051"
    token = "..."
    ca = "/home/me/ca.pem"

The file is `~/.config/trocar/config.toml` (`$XDG_CONFIG_HOME`), for its owner only.
"""

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from trocar._base.names import name_hint, shortened
from trocar._base.replacement import write_file

_OTHERS = 0o077
_MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class Profile:
    """One server, and how to connect to it."""

    server: str = ""
    """Its address, as `connect` takes it."""
    token: str = field(default="", repr=False)
    """Bearer token."""
    ca: str = ""
    """PEM file of the certificates to trust; implies TLS."""
    cert: str = ""
    """PEM file of the client certificate."""
    key: str = field(default="", repr=False)
    """PEM file of its private key."""
    tls: bool = False
    """Whether to connect with TLS."""

    def with_value(self, name: str, value: str) -> "Profile":
        """Return it with a setting changed; an empty value removes it.

        Raises:
            ValueError: There is no such setting, or it cannot have this value.
        """
        if name not in SETTINGS:
            raise ValueError(f"no setting {name!r}; {name_hint(name, SETTINGS)}")
        if name != "tls":
            if name in ("ca", "cert", "key") and value:
                value = str(Path(value).expanduser().absolute())
            changed: dict[str, Any] = {name: value}
            return replace(self, **changed)
        if value.lower() not in ("true", "false", ""):
            raise ValueError(f"tls={value!r} is neither true nor false")
        return replace(self, tls=value.lower() == "true")


SETTINGS = tuple(setting.name for setting in fields(Profile))
"""What a profile has."""


@dataclass(frozen=True)
class Profiles:
    """The profiles of the file."""

    current: str = ""
    """The one that is used where none is named; empty for none."""
    named: Mapping[str, Profile] = field(default_factory=dict)
    """By name."""

    def get(self, name: str) -> Profile:
        """Return a profile.

        Raises:
            ValueError: There is none of this name.
        """
        if name not in self.named:
            raise ValueError(
                f"no profile {name!r} in {profiles_file()}; {name_hint(name, self.named)}; "
                f"`trocar login SERVER --profile {name}` creates it"
            )
        return self.named[name]

    def with_profile(self, name: str, profile: Profile, *, is_current: bool = False) -> "Profiles":
        """Return them with a profile added or changed; the first one is current."""
        current = name if is_current or not self.current else self.current
        return Profiles(current, {**self.named, name: profile})


def profiles_file() -> Path:
    """Return where the profiles are."""
    base = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    return (base if base.is_absolute() else Path("~/.config").expanduser()) / "trocar" / "config.toml"


def read_profiles() -> Profiles:
    """Read the file; no profiles without it.

    Raises:
        ValueError: The file is not valid, or others may read it.
        OSError: It cannot be read.
    """
    path = profiles_file()
    try:
        with path.open("rb") as file:
            if os.name == "posix" and os.fstat(file.fileno()).st_mode & _OTHERS:
                raise ValueError(f"{path} holds tokens and may be read by others; run: chmod 600 {path}")
            content = file.read(_MOST_BYTES + 1)
    except FileNotFoundError:
        return Profiles()
    if len(content) > _MOST_BYTES:
        raise ValueError(f"{path} is larger than {_MOST_BYTES:,} bytes, so it is no file of profiles")
    try:
        return _parsed(tomllib.loads(content.decode()))
    except (ValueError, TypeError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise ValueError(f"{path}: {error}") from None


def write_profiles(profiles: Profiles) -> Path:
    """Replace the file, for its owner only, and return its path.

    Raises:
        OSError: It cannot be written.
    """
    path = profiles_file()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_file(path, _written(profiles), is_durable=True, mode=0o600)
    return path


def _parsed(read: dict[str, Any]) -> Profiles:
    unknown = set(read) - {"current", "profiles"}
    if unknown:
        raise ValueError(f"no setting {min(unknown)!r}; the file has `current` and [profiles.NAME]")
    tables, current = read.get("profiles", {}), read.get("current", "")
    if not isinstance(tables, dict) or not isinstance(current, str):
        raise TypeError("`current` is a name and `profiles` a table of profiles")
    named = {name: _profile(name, table) for name, table in tables.items()}
    if current and current not in named:
        raise ValueError(f"current = {current!r} is not a profile; {name_hint(current, named)}")
    return Profiles(current, named)


def _profile(name: str, table: object) -> Profile:
    if not isinstance(table, dict):
        raise TypeError(f"profiles.{name} is not a table")
    for key, value in table.items():
        if key not in SETTINGS:
            raise ValueError(f"profiles.{name}: no setting {key!r}; {name_hint(key, SETTINGS)}")
        if not isinstance(value, bool if key == "tls" else str):
            kind = "true or false" if key == "tls" else "a text"
            raise TypeError(f"profiles.{name}.{key} is {shortened(value)}, not {kind}")
    return Profile(**table)


def _written(profiles: Profiles) -> str:
    """Write TOML; strings of JSON are strings of TOML, but for one control character."""
    lines = [f"current = {_text(profiles.current)}"] if profiles.current else []
    for name, profile in profiles.named.items():
        lines += ["", f"[profiles.{_text(name)}]"]
        for setting in SETTINGS:
            value = getattr(profile, setting)
            if value:
                lines.append(f"{setting} = {'true' if value is True else _text(value)}")
    return "\n".join(lines).lstrip("\n") + "\n"


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
