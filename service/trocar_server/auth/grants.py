"""Grants: the scopes of a token or certificate name, and their file format."""

import hashlib
import json
import re
import secrets
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from trocar_api.value_words import refusals
from trocar_server.auth.scopes import Scope
from trocar_server.storage.durable import DamagedError

TOKEN_PREFIX = "trocar_"
"""Prefix of every token, so that scanners for leaked secrets find it."""

MAX_NAME_CHARACTERS = 128
_TOKEN_BYTES = 32  # 256 bits
_HASH = re.compile(r"[0-9a-f]{64}")
_RESERVED = "anonymous"


def check_name(name: str) -> str:
    """Validate the name of a principal and return it unchanged.

    Raises:
        ValueError: It is empty, too long, not printable, or could be mistaken for a caller without a name.
    """
    if not 0 < len(name) <= MAX_NAME_CHARACTERS or not name.isprintable() or name != name.strip():
        raise ValueError(
            f"a name has 1 to {MAX_NAME_CHARACTERS} printable characters and neither starts nor ends with "
            "a space"
        )
    if name == _RESERVED or _HASH.fullmatch(name):
        raise ValueError(f"'{name}' is reserved for callers without authentication; choose another name")
    return name


class Grant(BaseModel):
    """One entry of the token file. Only the hash of a token is stored."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    grant_id: str = Field(pattern=r"^[0-9a-f]{8}$")
    """Distinguishes several tokens of one name; not secret."""
    name: Annotated[str, AfterValidator(check_name)]
    """The principal: what is stored belongs to this name, whichever token was used."""
    scopes: frozenset[Scope] = Field(min_length=1)
    """As requested; see `with_included`."""
    created_at_s: int = Field(ge=0)
    """Seconds since 1970."""
    expires_at_s: int | None = Field(ge=0)
    """Seconds since 1970; None for never."""
    token_sha256: str | None = Field(pattern=r"^[0-9a-f]{64}$")
    """None if the grant is for a client certificate of this name, not for a token."""

    def is_expired(self, now_s: float) -> bool:
        """Whether it has expired."""
        return self.expires_at_s is not None and now_s >= self.expires_at_s


class _Content(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Literal[1] = 1
    grants: tuple[Grant, ...] = ()


def new_token() -> str:
    """Make a token of 256 random bits."""
    return TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)


def new_grant_id() -> str:
    """Make the id of a grant."""
    return secrets.token_hex(4)


def token_hash(token: str) -> str:
    """Return the sha256 of a token. A token has 256 random bits, so no salt and no slow hash is needed."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def encode(grants: tuple[Grant, ...]) -> bytes:
    """Return the content of the file."""
    plain = _Content(grants=grants).model_dump(mode="json")
    for grant in plain["grants"]:
        grant["scopes"].sort()
    return json.dumps(plain, indent=1, ensure_ascii=False).encode() + b"\n"


def decode(content: bytes) -> tuple[Grant, ...]:
    """Read the content of the file.

    Raises:
        DamagedError: The content is invalid; the text names fields, never values.
    """
    try:
        return _Content.model_validate_json(content).grants
    except ValidationError as error:
        (place, words), *_ = refusals(error.errors(include_input=False))
        raise DamagedError(f"{'.'.join(map(str, place)) or 'it'} {words}") from None
