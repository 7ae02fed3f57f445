"""Who calls: what stored things belong to."""

import hashlib
from collections.abc import Iterable
from typing import Any

from trocar_server.models import ANONYMOUS

_SCHEME = "bearer"


def principal_of(context: Any) -> str:
    """Return who makes a call: the sha256 of its bearer token, or `ANONYMOUS`.

    Whoever holds the token is its principal; the token itself is kept nowhere.
    """
    return principal_from(context.invocation_metadata() or ())


def principal_from(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return whom the metadata of a call name; see `principal_of`."""
    for key, value in metadata:
        if key.lower() != "authorization" or not isinstance(value, str):
            continue
        scheme, _, token = value.strip().partition(" ")
        if scheme.lower() == _SCHEME and token.strip():
            return hashlib.sha256(token.strip().encode("utf-8", "surrogatepass")).hexdigest()
    return ANONYMOUS
