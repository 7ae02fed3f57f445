"""Who makes the present call: set once for each call, asked where something belongs to somebody.

A context variable, so that no look-up can forget to ask: what nobody set is nobody's.
"""

from contextvars import ContextVar

ANONYMOUS = "anonymous"
"""Every caller without a token."""

_current: ContextVar[str | None] = ContextVar("principal", default=None)
_flow: ContextVar[str] = ContextVar("flow", default="")


def current_principal() -> str | None:
    """Return who makes the present call; None outside of calls."""
    return _current.get()


def set_principal(principal: str) -> None:
    """Say who makes the present call, for the rest of the task."""
    _current.set(principal)


def current_flow() -> str:
    """Return who shares the server's time as one with the present call; empty outside of calls.

    The principal, where callers have names. Work that a call leaves behind, as a fit, stays in its flow.
    """
    return _flow.get()


def set_flow(flow: str) -> None:
    """Say whose share of the server's time the rest of the task uses."""
    _flow.set(flow)
