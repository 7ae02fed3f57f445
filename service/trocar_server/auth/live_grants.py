"""Grants of the running server: read again when the token file has changed.

grants = LiveGrants(TokenFile(data_dir))
grants.load()
caller = grants.of_token(token)      # None: not valid
"""

import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from trocar_server.auth.grants import Grant, token_hash
from trocar_server.auth.scopes import Scope, with_included
from trocar_server.auth.token_file import TokenFile
from trocar_server.errors import ServiceError

CHECK_EVERY_S = 1.0
"""The longest delay until a new or revoked token takes effect."""

_log = structlog.get_logger("trocar")


@dataclass(frozen=True)
class Caller:
    """An authenticated caller, with its scopes."""

    name: str
    scopes: frozenset[Scope]
    """Including implied scopes."""


class LiveGrants:
    """The token file's grants, at most `CHECK_EVERY_S` old. No thread: each lookup checks the file.

    With an untrusted file every call is denied until the file is repaired.

    Args:
        file: The file.
        now: Seconds since 1970, for expiry.
        clock: Monotonic seconds, for the check interval.
    """

    def __init__(
        self,
        file: TokenFile,
        *,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file
        self._now = now
        self._clock = clock
        self._grants: tuple[Grant, ...] = ()
        self._stamp: tuple[int, ...] | None = None
        self._problem = ""
        self._checked_at_s = float("-inf")

    def load(self) -> int:
        """Read the file; return the number of valid entries.

        Raises:
            ServiceError: `STORAGE_UNAVAILABLE`, the file cannot be trusted or read.
        """
        self._checked_at_s = self._clock()
        self._stamp = self._look()
        self._grants = self._file.read()
        return sum(not grant.is_expired(self._now()) for grant in self._grants)

    def of_token(self, token: str) -> Caller | None:
        """Caller of a token; None for one that is unknown, expired or revoked."""
        self._refresh()
        digest, result = token_hash(token), None
        for grant in self._grants:  # all of them, each in constant time: the duration reveals nothing
            if grant.token_sha256 is not None and hmac.compare_digest(grant.token_sha256, digest):
                result = grant
        if result is None or result.is_expired(self._now()):
            return None
        return Caller(result.name, with_included(result.scopes))

    def of_certificate(self, name: str) -> Caller | None:
        """Caller of a certificate name, with the scopes of all its entries; None without any."""
        self._refresh()
        now_s = self._now()
        own = [
            grant.scopes
            for grant in self._grants
            if grant.token_sha256 is None and grant.name == name and not grant.is_expired(now_s)
        ]
        return Caller(name, with_included(frozenset().union(*own))) if own else None

    def _refresh(self) -> None:
        now_s = self._clock()
        if now_s - self._checked_at_s < CHECK_EVERY_S:
            return
        self._checked_at_s = now_s
        stamp = self._look()
        if stamp == self._stamp:
            return
        try:
            self._grants, self._stamp, self._problem = self._file.read(), stamp, ""
        except ServiceError as error:
            if error.message != self._problem:
                _log.error("the token file is not used; no token is valid", problem=error.message)
            self._grants, self._stamp, self._problem = (
                (),
                None,
                error.message,
            )  # and check again a second later

    def _look(self) -> tuple[int, ...] | None:
        """Fingerprint of the file's version; taken before it is read."""
        try:
            status = self._file.path.lstat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size
