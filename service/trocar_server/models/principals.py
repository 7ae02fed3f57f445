"""Who makes the present call: set once for each call, asked where something belongs to somebody.

A context variable, so that no look-up can forget to ask: what nobody set is nobody's.
"""

from contextvars import ContextVar

ANONYMOUS = "anonymous"
"""Every caller without a token."""

_current: ContextVar[str | None] = ContextVar("principal", default=None)


def current_principal() -> str | None:
    """Return who makes the present call; None outside of calls."""
    return _current.get()


def set_principal(principal: str) -> None:
    """Say who makes the present call, for the rest of the task."""
    _current.set(principal)
