"""Caller of the current call: a context variable, set once per call, read wherever something has an owner.

A context variable, so that no lookup can omit it; unset, it is None and owns nothing.
"""

import re
from contextvars import ContextVar

ANONYMOUS = "anonymous"
"""Principal of every caller without a token."""

_HASH = re.compile(r"[0-9a-f]{64}")

_current: ContextVar[str | None] = ContextVar("principal", default=None)
_flow: ContextVar[str] = ContextVar("flow", default="")


def is_unproven(principal: str) -> bool:
    """Whether a principal is the hash of an unverified token.

    One client can make any number of these, and no granted name looks like one (see
    `auth.grants.check_name`). A limit on how many of them store something must not affect callers with a name
    or without a token.
    """
    return _HASH.fullmatch(principal) is not None


def current_principal() -> str | None:
    """Principal of the current call; None outside of calls."""
    return _current.get()


def set_principal(principal: str) -> None:
    """Set the principal of the current call, for the rest of the task."""
    _current.set(principal)


def current_flow() -> str:
    """Flow of the current call, the unit of fair scheduling; empty outside of calls.

    The principal, if callers have names. Work that outlives a call, such as a fit, stays in its flow.
    """
    return _flow.get()


def set_flow(flow: str) -> None:
    """Set the flow for the rest of the task."""
    _flow.set(flow)
