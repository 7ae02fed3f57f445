"""Token file: tokens are created, listed and revoked by the operator, also while the server runs.

file = TokenFile(data_dir)
grant, token = file.add("alice", {Scope.RUN}, expires_at_s=None, now_s=time.time())
file.revoke("alice")
"""

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from trocar_api.reasons import ErrorReason
from trocar_server.auth.grants import (
    TOKEN_PREFIX,
    Grant,
    check_name,
    decode,
    encode,
    new_grant_id,
    new_token,
    token_hash,
)
from trocar_server.auth.scopes import Scope
from trocar_server.errors import ServiceError
from trocar_server.storage.disk_errors import disk_errors
from trocar_server.storage.durable import DamagedError, make_folder, read_whole, remove_partial, write_durably

MAX_GRANTS = 1000
"""Entries at most. A call compares its token with all, twice: 0.16 ms for this many, 5 us for ten."""

_MAX_BYTES = 4 << 20
_OTHERS = 0o077


class TokenFile:
    """`tokens.json` of a data directory, with mode 0600.

    Args:
        folder: The data directory; created with the first token.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tokens.json"
        self._lock = folder / "tokens.lock"

    def read(self) -> tuple[Grant, ...]:
        """All entries, including expired ones; empty without a file.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`, it is damaged, others may read it, or the disk failed.
        """
        try:
            with disk_errors("list of tokens"):
                return self._read()
        except DamagedError as error:
            raise ServiceError(
                ErrorReason.STORAGE_UNAVAILABLE,
                f"'{self.path.name}' of the data directory cannot be trusted: {error}. All of its tokens are "
                "refused; repair it, or remove it and create new tokens",
            ) from None

    def add(
        self,
        name: str,
        scopes: Iterable[Scope],
        *,
        expires_at_s: int | None,
        now_s: float,
        for_certificate: bool = False,
    ) -> tuple[Grant, str | None]:
        """Grant scopes to a name; its other grants remain.

        Args:
            name: The principal.
            scopes: Its scopes, at least one.
            expires_at_s: Expiry in seconds since 1970; None for never.
            now_s: The current time, likewise.
            for_certificate: Whether the grant is for a client certificate of this name; no token is made
                then.

        Returns:
            The entry and the token, which is not stored.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, the name is invalid; `QUOTA_EXCEEDED`, there are too many
                entries; or what `read` raises, or `STORAGE_FULL`.
        """
        token = None if for_certificate else new_token()
        try:
            check_name(name)
        except ValueError as error:
            raise ServiceError(ErrorReason.INVALID_ARGUMENT, str(error)) from None
        grant = Grant(
            grant_id=new_grant_id(),
            name=name,
            scopes=frozenset(scopes),
            created_at_s=int(now_s),
            expires_at_s=expires_at_s,
            token_sha256=None if token is None else token_hash(token),
        )
        with self._locked():
            before = self.read()
            if len(before) >= MAX_GRANTS:
                raise ServiceError(
                    ErrorReason.QUOTA_EXCEEDED,
                    f"there are {MAX_GRANTS} tokens, the maximum; revoke old ones first",
                )
            self._write((*before, grant))
        return grant, token

    def revoke(self, name_or_id: str) -> tuple[Grant, ...]:
        """Remove every entry of a name, or the one of an id or of a token; return the removed entries.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, no entry matches; or what `read` raises, or `STORAGE_FULL`.
        """
        digest = token_hash(name_or_id)
        with self._locked():
            before = self.read()
            gone = tuple(grant for grant in before if grant.name == name_or_id) or tuple(
                grant for grant in before if name_or_id == grant.grant_id or digest == grant.token_sha256
            )
            if not gone:
                raise _unknown(name_or_id)
            self._write(tuple(grant for grant in before if grant not in gone))
        return gone

    def _read(self) -> tuple[Grant, ...]:
        try:
            status = self.path.lstat()
        except FileNotFoundError:
            return ()
        if status.st_uid not in (os.geteuid(), 0):
            raise DamagedError("it belongs to another user")
        if stat.S_IMODE(status.st_mode) & _OTHERS:
            raise DamagedError("other users may read or write it; give it mode 0600")
        return decode(read_whole(self.path, _MAX_BYTES))

    def _write(self, grants: tuple[Grant, ...]) -> None:
        with disk_errors("list of tokens"):
            remove_partial(self.path.parent, f"{self.path.stem}-")
            write_durably(self.path, encode(grants))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclusive lock for commands that change the file. The server only reads, so it needs no lock."""
        with disk_errors("list of tokens"):
            make_folder(self._lock.parent)
            descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            with disk_errors("list of tokens"):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


def _unknown(name_or_id: str) -> ServiceError:
    """Error for an unknown name; a token that was typed in its place is not repeated."""
    shown = "this" if name_or_id.startswith(TOKEN_PREFIX) else f"'{name_or_id}'"
    return ServiceError(
        ErrorReason.INVALID_ARGUMENT,
        f"no token has the name or id {shown}; `trocar admin token list` lists all",
    )
