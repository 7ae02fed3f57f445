"""Which versions of client and server understand each other.

The wire contract only grows within a major version (`buf breaking` in CI). So a server understands clients of
its own minor version and of earlier ones; a newer client may ask for what it does not know.
"""

import re

VERSION_KEY = "x-trocar-version"
"""The metadata key under which a client says its version."""

_VERSION = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})(?:[.+-][A-Za-z0-9.+-]*)?")


def parse_version(text: str) -> tuple[int, int] | None:
    """Return major and minor, or None where the text is no version."""
    match = _VERSION.fullmatch(text[:64])
    return (int(match[1]), int(match[2])) if match else None


def is_understood(client: str, server: str) -> bool:
    """Tell whether a server of one version understands a client of another; True where either is unknown.

    is_understood("0.3.2", "0.3.0")      # True: patches change nothing on the wire
    is_understood("0.4.0", "0.3.9")      # False: the client is newer
    is_understood("1.0.0", "2.0.0")      # False: another major version
    """
    ours, theirs = parse_version(server), parse_version(client)
    if ours is None or theirs is None:
        return True
    return theirs[0] == ours[0] and theirs[1] <= ours[1]
